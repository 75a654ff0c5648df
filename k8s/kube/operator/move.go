package operator

import (
	"context"
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// settles is how long a part that was given to a host may take to be seen there, before it is said again.
const settles = 30 * time.Second

// told is what a daemon was told of a part, why it refused if it did, and until when it is not told again.
type told struct {
	moving  v1alpha1.Moving
	refused string
	until   time.Time
}

// move has the daemon give a part to another host, as the elected operator has written. It returns what the daemon says of the VM then, or why it refuses, and
// when to look again.
//
// The other host's operator has to have said first that it has nothing of the VM: it has remembered by then that it may have something, so that it takes it away
// should the object be no more. It says the same for as long as its daemon has nothing, so an order that came to nothing half-way is given again, by whoever
// leads then.
func (host *host) move(ctx context.Context, object v1alpha1.Protected, here control.VM) (control.VM, string, time.Duration) {
	status := object.Seen()
	moving := status.Moving
	if moving == nil {
		host.forgetTold(here.Name)
		return here, "", 0
	}
	if here.Role != "primary" || moving.From == host.name || host.isTaken(here, *moving) || host.stays(ctx, object, here) {
		return here, "", 0
	}
	if !has(status.Gone, moving.To) {
		if moving.Part == PartStandby {
			// Whether all of the group are heard meanwhile nobody tells.
			return here, "", later
		}
		return here, "", 0
	}
	if known, left := host.told(here.Name, *moving); left > 0 {
		return here, known.refused, left
	}
	ctx, end := context.WithTimeout(ctx, longest)
	defer end()
	err := host.order(ctx, here.Name, *moving)
	host.counts(here.Name, moving.To, err)
	if err != nil {
		refused := fmt.Sprintf("its %s does not go from host '%s' to host '%s': %v", partWords[moving.Part], moving.From, moving.To, err)
		host.setTold(here.Name, told{*moving, refused, time.Now().Add(later)})
		return here, refused, later
	}
	host.setTold(here.Name, told{*moving, "", time.Now().Add(settles)})
	if now, err := host.daemon.Status(ctx); err == nil {
		if there, found := now.Find(here.Name); found && host.speaks(object, there) {
			here = there
		}
	}
	return here, "", settles
}

func (host *host) order(ctx context.Context, vm string, moving v1alpha1.Moving) error {
	if moving.Part == PartStandby {
		return host.daemon.Standby(ctx, vm, moving.To)
	}
	// Who drains a node, or deletes it, knows that it is alive.
	unprotected := moving.Why == Drained || moving.Why == Deleted
	return host.daemon.Move(ctx, vm, control.Place(moving.Part), moving.To, unprotected)
}

func (host *host) told(vm string, moving v1alpha1.Moving) (told, time.Duration) {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	known := host.orders[vm]
	if known.moving != moving {
		return told{}, 0
	}
	return known, time.Until(known.until)
}

func (host *host) setTold(vm string, told told) {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	host.orders[vm] = told
}

func (host *host) forgetTold(vm string) {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	delete(host.orders, vm)
}

// stays says whether a part stays where it is: its host is there again before it has left the group, or the other one is not heard any more. Only the host that
// leads says so, which gives the order too: so none is on its way.
func (host *host) stays(ctx context.Context, object v1alpha1.Protected, here control.VM) bool {
	moving := object.Seen().Moving
	if moving == nil || moving.Part != PartStandby && !inGroup(here, moving.From) {
		return false
	}
	list := &v1alpha1.DunlinHostList{}
	node := &v1.Node{}
	err := host.Get(ctx, client.ObjectKey{Name: moving.From}, node)
	if client.IgnoreNotFound(err) != nil || host.List(ctx, list) != nil {
		return false
	}
	hosts := byName(list)
	if to := hosts[moving.To]; to == nil || !isHeard(to) {
		return true
	}
	if moving.Part == PartStandby && staysStandby(object, hosts) {
		return true
	}
	// By what the elected operator goes by too, or the one would write what the other takes back.
	switch moving.Why {
	case Deleted:
		return err == nil
	case Drained:
		return err == nil && !node.Spec.Unschedulable
	case Refused:
		return here.Standby == moving.From
	case Empty:
		return !has(object.Seen().Gone, moving.From)
	}
	return !isSilent(moving.From, hosts)
}

func inGroup(here control.VM, name string) bool {
	return slices.ContainsFunc(here.Peers, func(peer control.Peer) bool { return peer.Host == name })
}

// isTaken says whether the standby has got the part meanwhile, which was to go to another host. To give that order after all would drop the standby's copy. Of the
// place as standby it says whether another host has that, or a part.
func (host *host) isTaken(here control.VM, moving v1alpha1.Moving) bool {
	if moving.Part == PartStandby {
		return host.isNamed(here, moving)
	}
	if moving.Part != PartBackup || moving.From == host.name || inGroup(here, moving.From) {
		return false
	}
	return slices.ContainsFunc(here.Peers, func(peer control.Peer) bool { return !peer.Witness && peer.Host != moving.To })
}

// follow is a placement with the hosts that the VM's group has by what the host says that leads it: one that has left is followed by the one that has come.
// While one has left and none has come, it is as before.
func follow(placement *v1alpha1.Placement, here control.VM, name string) *v1alpha1.Placement {
	copies, witnesses := []string{name}, []string{}
	for _, peer := range here.Peers {
		if peer.Witness {
			witnesses = append(witnesses, peer.Host)
		} else {
			copies = append(copies, peer.Host)
		}
	}
	now := placement.DeepCopy()
	var come []string
	for _, one := range copies {
		if !has(placement.Members, one) {
			come = append(come, one)
		}
	}
	for at, member := range placement.Members {
		if !has(copies, member) && len(come) == 1 {
			now.Members[at], come = come[0], nil
		}
	}
	if len(witnesses) == 1 && placement.Witness != "" {
		now.Witness = witnesses[0]
	}
	followStandby(placement, now, here.Standby)
	return now
}

// followGroup writes into the status which hosts the group has, and that a part is where it was to go. stays is whether it does not go after all.
func (host *host) followGroup(here control.VM, stays bool, status *v1alpha1.ProtectedStatus) {
	before := status.Placement.Hosts()
	status.Placement = follow(status.Placement, here, host.name)
	now := status.Placement.Hosts()
	for _, name := range before {
		if !has(now, name) {
			// What it has, or not, is of no interest any more.
			status.Gone = without(status.Gone, name)
		}
	}
	moving := status.Moving
	if moving == nil {
		return
	}
	if moving.Part == PartStandby {
		if stays || host.isTaken(here, *moving) {
			// A standby has nothing, as long as both copies' hosts are there, and does not say so.
			status.Moving, status.Gone = nil, without(status.Gone, moving.To)
		}
	} else if stays || host.isTaken(here, *moving) || !has(now, moving.From) && !has(status.Gone, moving.To) {
		status.Moving = nil
	}
}

// tellOfMove says what has become of a part that was to go to another host, and which hosts have come without that.
func (host *host) tellOfMove(object v1alpha1.Protected, moving *v1alpha1.Moving, before *v1alpha1.Placement) {
	status, word := object.Seen(), kindOf(object).word
	now := status.Placement.Hosts()
	for at, name := range before.Hosts() {
		if now[at] != name {
			host.events.Eventf(object, v1.EventTypeNormal, "Moved", "host %s has the part in the %s that host %s had", now[at], word, name)
		}
	}
	if moving == nil {
		return
	}
	stays := has(now, moving.From)
	if standby := status.Placement.Standby; moving.Part == PartStandby {
		stays = standby == moving.From
		if standby == moving.To {
			host.events.Eventf(object, v1.EventTypeNormal, "Moved", "host %s is the %s's standby, which host %s was", standby, word, moving.From)
		}
	}
	if status.Moving == nil && stays {
		host.events.Eventf(object, v1.EventTypeNormal, "Stays", "host %s keeps its %s: it is there again, or host %s is not there any more", moving.From, partWords[moving.Part], moving.To)
	}
}
