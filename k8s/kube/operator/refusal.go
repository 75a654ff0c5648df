package operator

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// A host that is to have a part may refuse it: an image is not there, or CRIU. Its daemon says so before anything has changed, and the operator on the host that leads
// asks it again for a while; then it writes the refusal into the status. The elected operator remembers it for a while, by its own clock, and has another host be
// asked, if there is one.
//
// Invariant: nothing that is under way is broken off: a part whose old host has left the group stays with the new one.

const (
	// mostRefusals are how often in a row a host refuses until another one is tried.
	mostRefusals = 3
	// refusedFor is how long a host is not asked again while there are others. Whoever mends it need not tell.
	refusedFor = 10 * time.Minute
)

// Refused: it does not take the place as standby that it is to have.
const Refused = "Refused"

// refusals are those that the elected operator has seen: by object, then by host, with the time. Another one that is elected begins anew.
type refusals struct {
	mutex sync.Mutex
	after time.Duration
	since map[string]time.Time
}

func newRefusals() *refusals { return &refusals{after: refusedFor, since: map[string]time.Time{}} }

func refusalOf(object v1alpha1.Protected, host string) string { return emptiness(object) + host }

// note remembers that a host has refused, and says whether that is new.
func (refusals *refusals) note(object v1alpha1.Protected, host string) bool {
	if refusals.lately(object, host) {
		return false
	}
	refusals.mutex.Lock()
	defer refusals.mutex.Unlock()
	refusals.since[refusalOf(object, host)] = time.Now()
	return true
}

// lately says whether a host has refused, not too long ago. There is nothing to remember where nobody has refused.
func (refusals *refusals) lately(object v1alpha1.Protected, host string) bool {
	return refusals.left(object, host) > 0
}

func (refusals *refusals) left(object v1alpha1.Protected, host string) time.Duration {
	if refusals == nil {
		return 0
	}
	refusals.mutex.Lock()
	defer refusals.mutex.Unlock()
	since, known := refusals.since[refusalOf(object, host)]
	left := refusals.after - time.Since(since)
	if known && left <= 0 {
		delete(refusals.since, refusalOf(object, host))
	}
	return max(left, 0)
}

// soonest is when the first host may be asked again that has refused this object; 0 if none has.
func (refusals *refusals) soonest(object v1alpha1.Protected, hosts map[string]*v1alpha1.DunlinHost) (soonest time.Duration) {
	for name := range hosts {
		soonest = earlier(soonest, refusals.left(object, name))
	}
	return soonest
}

func (refusals *refusals) forget(object v1alpha1.Protected) {
	if refusals == nil {
		return
	}
	refusals.mutex.Lock()
	defer refusals.mutex.Unlock()
	for of := range refusals.since {
		if strings.HasPrefix(of, emptiness(object)) {
			delete(refusals.since, of)
		}
	}
}

// heed remembers what the status says of a host that has refused, and takes its part back if another host could have it; and whether it has written that.
func (placer *placer) heed(ctx context.Context, object v1alpha1.Protected, seen *view) (bool, error) {
	status := object.Seen()
	refusal := status.Refusal
	if refusal == nil {
		return false, nil
	}
	if placer.refusals.note(object, refusal.Host) {
		found, err := placer.candidates(ctx, object, seen.hosts)
		if err != nil {
			return false, err
		}
		seen.take(found)
	}
	seen.again = earlier(seen.again, placer.refusals.soonest(object, seen.hosts))
	if !placer.hasOther(object, *seen) {
		return false, nil
	}
	moving := status.Moving
	switch {
	case moving != nil && moving.To == refusal.Host && moving.To != status.Placement.Standby:
		err := change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
			status.Moving, status.Refusal, status.Gone = nil, nil, without(status.Gone, moving.To)
		})
		if err == nil {
			placer.events.Eventf(object, v1.EventTypeWarning, "NotMoved", "host %s refuses the %s that host %s had, and another host is asked: %s", moving.To, partWords[moving.Part], moving.From, refusal.Why)
		}
		return true, err
	case moving == nil && status.Placement.Standby == refusal.Host && status.Standby == "":
		// It has nothing, and is no use: as a standby that is away.
		seen.away[refusal.Host] = Refused
	}
	return false, nil
}

// hasOther says whether there is a host that could have a part and has not refused one.
func (placer *placer) hasOther(object v1alpha1.Protected, seen view) bool {
	return slices.ContainsFunc(seen.free, func(name string) bool { return !placer.refusals.lately(object, name) })
}

// counts notes what a daemon has answered to an order that gives this host a part of a VM: how often in a row that one has refused.
func (host *host) counts(vm, to string, answer error) {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	known := host.refusals[vm]
	var refused *control.Refused
	is := errors.As(answer, &refused)
	if known.to != to || !is {
		known = refusedBy{to: to}
	}
	if is {
		known.times, known.why = known.times+1, refused.Error()
	}
	if known.times == 0 {
		delete(host.refusals, vm)
	} else {
		if host.refusals == nil {
			host.refusals = map[string]refusedBy{}
		}
		host.refusals[vm] = known
	}
}

// refusedBy is a host that has refused a part so often.
type refusedBy struct {
	to, why string
	times   int
}

// tellRefusal writes who has refused a part that it is to have, as long as it is to have it and nothing of it has happened.
func (host *host) tellRefusal(object v1alpha1.Protected, here control.VM, status *v1alpha1.ProtectedStatus) {
	host.mutex.Lock()
	known := host.refusals[here.Name]
	host.mutex.Unlock()
	status.Refusal = nil
	moving, isTo := status.Moving, false
	switch {
	case known.times < mostRefusals:
	case moving != nil:
		isTo = moving.To == known.to && (moving.Part == PartStandby || inGroup(here, moving.From))
	default:
		isTo = status.Placement.Standby == known.to && here.Standby == "" && object.Asked().Strength == 3
	}
	if isTo {
		status.Refusal = &v1alpha1.Refusal{Host: known.to, Why: known.why}
	}
}
