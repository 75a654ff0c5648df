package operator

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// A VM's standby (strength 3): a host without a part, whose Pod holds the room for one. The daemons give it the part of a copy's host that stays away, and
// that host is the standby afterwards. So each Pod stays where it is: the numbers of copies stay with their hosts ([v1alpha1.Placement.Copies]).
//
// The operator names it when it places the VM, follows what the group says, and gives it parts itself only where daemons do not see that a host is away:
// because it answers.

// itsHosts says them for a person.
func itsHosts(placement *v1alpha1.Placement) string {
	said := "its hosts are " + strings.Join(placement.Hosts(), ", ")
	if placement.Standby != "" {
		said += "; its standby is " + placement.Standby
	}
	return said
}

// standby is the host that gets the part of a copy's host that is away, if there is one that can.
func (view view) standby(object v1alpha1.Protected) string {
	standby := object.Seen().Placement.Standby
	if host := view.hosts[standby]; host == nil || !isHeard(host) || view.away[standby] != "" {
		return ""
	}
	return standby
}

// keepsPod says whether the Pod of a host stays there although the host may be away: it is the standby, or will be.
func (view view) keepsPod(object v1alpha1.Protected, home string) bool {
	status := object.Seen()
	switch moving := status.Moving; {
	case status.Placement.Standby == "":
		return false
	case home == status.Placement.Standby:
		return true
	case moving != nil && moving.From == home:
		return moving.To == status.Placement.Standby
	}
	return view.away[home] != "" && home != status.Placement.Witness && view.standby(object) != ""
}

// followStandby writes which host is the standby now, and which numbers the copies have. said is what the daemon says that leads the group: nothing, if it
// knows of no standby.
func followStandby(before, now *v1alpha1.Placement, said string) {
	if before.Standby == "" {
		return
	}
	group := now.Hosts()
	switch {
	case said != "" && !has(group, said):
		now.Standby = said
	case has(group, before.Standby):
		// Whoever has left it its part.
		now.Standby = ""
		for _, name := range before.Hosts() {
			if !has(group, name) {
				now.Standby = name
			}
		}
	}
	come := slices.DeleteFunc(append(slices.Clone(now.Members), now.Standby), func(name string) bool { return name == "" || has(before.Copies, name) })
	for number, name := range now.Copies {
		if len(come) > 0 && name != now.Standby && !has(now.Members, name) {
			now.Copies[number], come = come[0], come[1:]
		}
	}
}

// waitsForStandby says when to try again to start a VM whose standby has not remembered it: the daemons give that one a part without asking an operator.
func (host *host) waitsForStandby(ctx context.Context, object v1alpha1.Protected) (time.Duration, error) {
	standby := object.Seen().Placement.Standby
	if standby == "" {
		return 0, nil
	}
	there := &v1alpha1.DunlinHost{}
	if err := host.Get(ctx, client.ObjectKey{Name: standby}, there); err != nil && !apierrors.IsNotFound(err) {
		return 0, err
	}
	remembers := func(vm v1alpha1.HostVM) bool { return vm.VM == NameOnHosts(object) }
	switch {
	case slices.ContainsFunc(there.Status.VMs, remembers):
		return 0, nil
	case isHeard(there):
		return soon, nil
	}
	return later, host.refused(ctx, object, "StandbySilent", fmt.Errorf("host '%s' is to be its standby, and is not heard", standby))
}
