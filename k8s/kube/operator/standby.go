package operator

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// A VM's standby (strength 3): a host without a part, whose Pod holds the room for one. The daemons give it the part of a copy's host that stays away, and
// that host is the standby afterwards. So each Pod stays where it is: the numbers of copies stay with their hosts ([v1alpha1.Placement.Copies]).
//
// The operator names it when it places the VM, follows what the group says, and gives it parts itself only where daemons do not see that a host is away:
// because it answers. It has another one named where the standby itself is away (replace.go).

// A changed strength is carried out while the VM runs. 2 -> 3: a third Pod is made for a host without a part -> where that has a place, the elected operator writes that
// host as the standby -> its operator remembers the VM -> the operator on the host that leads has the daemons name it. 3 -> 2: the daemons are told that there is
// none any more -> when they say so, the placement has none, and the Pod goes.
//
// So it is where no fourth host was there when the VM was placed, and the third Pod stands for the witness: that Pod is made anew for a host without a part when one comes.

// lacksStandby says whether it was asked for a standby, and has none.
func lacksStandby(object v1alpha1.Protected) bool {
	placement := object.Seen().Placement
	return placement != nil && object.Asked().Strength == 3 && placement.Standby == "" && len(placement.Members) == 2 &&
		object.GetDeletionTimestamp() == nil
}

// grows says whether it is to get the standby now that it lacks: from a VM that nobody serves nobody can be asked to have one.
func grows(object v1alpha1.Protected) bool {
	return lacksStandby(object) && object.Seen().Primary != ""
}

// grow writes which host is to be the standby, when its Pod has a node; and whether it has written it.
func (placer *placer) grow(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, seen view) (bool, error) {
	if !grows(object) || object.Seen().Moving != nil || !seen.allAreHeard(object) {
		return false, nil
	}
	placement := object.Seen().Placement
	number := placement.Spare()
	pod := pods[number]
	if pod == nil || isGone(pod) || !has(seen.free, pod.Spec.NodeName) {
		return false, nil
	}
	name := pod.Spec.NodeName
	err := change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
		placement := status.Placement
		if len(placement.Copies) == 0 {
			placement.Copies = append(slices.Clone(placement.Members), name)
		}
		placement.Standby, placement.Copies[number], placement.Strength = name, name, len(placement.Copies)
		// What that host says of itself from now on is said by one that knows that it may have a part.
		status.Gone = without(status.Gone, name)
	})
	if err == nil {
		placer.events.Eventf(object, v1.EventTypeNormal, "GetsStandby", "host %s is to be its standby", name)
	}
	return true, err
}

// shrink takes the standby out of a placement where it is not asked for any more, and the daemons know of none. The copies' numbers are those of their hosts' Pods, as
// far as they are small enough.
func shrink(asked int, here control.VM, status *v1alpha1.ProtectedStatus) {
	placement := status.Placement
	if asked != 2 || placement.Strength != 3 || len(placement.Members) != 2 || here.Standby != "" {
		return
	}
	number := func(name string) int { return slices.Index(placement.Copies, name) }
	slices.SortFunc(placement.Members, func(one, other string) int { return number(one) - number(other) })
	status.Gone = without(status.Gone, placement.Standby)
	placement.Standby, placement.Copies, placement.Strength = "", nil, 2
}

// nameStandby has the daemons name the standby that is asked for, or none. Where they know of one and another one is written, theirs is the one. It returns why they do
// not, and when to look again.
func (host *host) nameStandby(ctx context.Context, object v1alpha1.Protected, here control.VM) (refused string, again time.Duration) {
	want := object.Seen().Placement.Standby
	if object.Asked().Strength == 2 {
		want = ""
	} else if moving := object.Seen().Moving; moving != nil && moving.Part == PartStandby {
		// Another one is to be named: [host.move].
		return "", 0
	}
	if here.Role != "primary" || object.Asked().Strength == 1 || want == here.Standby || want != "" && here.Standby != "" || inGroup(here, want) || want == host.name {
		return "", 0
	}
	if want != "" {
		there := &v1alpha1.DunlinHost{}
		if err := host.Get(ctx, client.ObjectKey{Name: want}, there); err != nil {
			return fmt.Sprintf("host '%s' is not its standby yet: %v", want, err), later
		}
		if !remembers(there, object) {
			again = soon
			if !isHeard(there) {
				again = later
			}
			return fmt.Sprintf("host '%s' is not its standby yet: it has not been heard since it is to be", want), again
		}
	}
	ctx, end := context.WithTimeout(ctx, longest)
	defer end()
	err := host.daemon.Standby(ctx, here.Name, want)
	host.counts(here.Name, want, err)
	switch {
	case err == nil && want == "":
		host.events.Eventf(object, v1.EventTypeNormal, "NoStandby", "its strength is 2: host %s is its standby no more", here.Standby)
	case err == nil:
		host.events.Eventf(object, v1.EventTypeNormal, "HasStandby", "its strength is 3: host %s is its standby", want)
	case want == "":
		return fmt.Sprintf("host '%s' is its standby still: %v", here.Standby, err), later
	default:
		return fmt.Sprintf("host '%s' is not its standby yet: %v", want, err), later
	}
	// The daemon tells of it.
	return "", soon
}

// remembers says whether a host knows that it may have something of it.
func remembers(host *v1alpha1.DunlinHost, object v1alpha1.Protected) bool {
	return slices.ContainsFunc(host.Status.VMs, func(vm v1alpha1.HostVM) bool { return vm.VM == NameOnHosts(object) })
}

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
		return !view.replacesStandby(object) && (moving == nil || moving.From != home)
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
	switch {
	case remembers(there, object):
		return 0, nil
	case isHeard(there):
		return soon, nil
	}
	return later, host.refused(ctx, object, "StandbySilent", fmt.Errorf("host '%s' is to be its standby, and is not heard", standby))
}
