package operator

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// Why a host's part in a VM goes to another host, if there is one.
const (
	// Lost: nothing has been heard of its operator for long, or its daemon has not answered, and no host that is heard is connected with that daemon.
	Lost = "Lost"
	// Deleted: its Kubernetes node is no more.
	Deleted = "Deleted"
	// Empty: it is there, and has had nothing of the VM for long.
	Empty = "Empty"
	// Drained: its node is cordoned, and the Pod that stood for the copy is gone from it.
	Drained = "Drained"
)

// words are what a person reads of a host that is away.
var awayWords = map[string]string{
	Lost: "is lost: nothing is heard of it", Deleted: "is lost: its node was deleted", Empty: "has nothing of it any more", Drained: "is being drained",
	Refused: "does not take the place as standby",
}

// patience is for what has to hold for a while before it counts. Clocks of hosts are not compared: a while is by this operator's own clock, and begins anew when
// another one is elected.
type patience struct {
	after time.Duration
	mutex sync.Mutex
	since map[string]time.Time
}

// lasts says whether this has held for long enough; if not, how long it still has to.
func (patience *patience) lasts(what string, holds bool) (bool, time.Duration) {
	patience.mutex.Lock()
	defer patience.mutex.Unlock()
	if !holds {
		delete(patience.since, what)
		return false, 0
	}
	since, known := patience.since[what]
	if !known {
		since = time.Now()
		patience.since[what] = since
	}
	left := patience.after - time.Since(since)
	return left <= 0, max(left, 0)
}

// forget says nothing more of what begins so.
func (patience *patience) forget(prefix string) {
	patience.mutex.Lock()
	defer patience.mutex.Unlock()
	for what := range patience.since {
		if strings.HasPrefix(what, prefix) {
			delete(patience.since, what)
		}
	}
}

// view is what the elected operator sees when it looks at an object that has its hosts.
type view struct {
	hosts map[string]*v1alpha1.DunlinHost
	// away are hosts of the object, and the host that one of its parts goes to, that are no use for it; and why.
	away map[string]string
	// unsure are hosts of which nothing is heard, for less long than it takes: another operator may have had more patience before it was this one's turn.
	unsure map[string]bool
	// free are hosts that could have a copy: they are heard, have no part, and lack nothing. others could be the witness and have no copy, and lacks is what those lack
	// that lack something.
	free, others []string
	lacks        map[string]string
	// again is when to look again without news; 0 is never.
	again time.Duration
}

// see looks at an object's hosts. pods are those that there are, by copy.
func (placer *placer) see(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, hosts map[string]*v1alpha1.DunlinHost) (view, error) {
	view, status := view{hosts: hosts, away: map[string]string{}, unsure: map[string]bool{}}, object.Seen()
	if status.Placement == nil || status.Primary == "" {
		// Nobody serves it, so that there is nothing from which a copy could be made.
		return view, nil
	}
	for number, name := range status.Hosts() {
		why, left, err := placer.why(ctx, object, name, hosts)
		if err != nil {
			return view, err
		}
		view.again, view.unsure[name] = earlier(view.again, left), left > 0
		if number < status.Placement.Strength && why == "" {
			if why, err = placer.drained(ctx, name, pods[number]); err != nil {
				return view, err
			}
		}
		if why != "" {
			view.away[name] = why
		}
	}
	if len(view.away) == 0 && !grows(object) && status.Refusal == nil {
		return view, nil
	}
	found, err := placer.candidates(ctx, object, hosts)
	view.take(found)
	if len(view.lacks) > 0 {
		// Nobody is told of each host that has got what it lacked.
		view.again = earlier(view.again, lookAgain)
	}
	return view, err
}

// lookAgain is when hosts that lack something are looked at again.
const lookAgain = 10 * time.Second

func (view *view) take(found candidates) {
	view.free, view.others, view.lacks = found.free, found.others, found.lacks
}

// why a host is away, drained or not; or how long until it may be.
func (placer *placer) why(ctx context.Context, object v1alpha1.Protected, name string, hosts map[string]*v1alpha1.DunlinHost) (string, time.Duration, error) {
	node := &v1.Node{}
	if err := placer.Get(ctx, client.ObjectKey{Name: name}, node); apierrors.IsNotFound(err) {
		return Deleted, 0, nil
	} else if err != nil {
		return "", 0, err
	}
	lost, left := placer.patience.lasts("host "+name, isSilent(name, hosts))
	if lost {
		return Lost, 0, nil
	}
	status := object.Seen()
	// Neither who is being given a part nor a standby has to have anything.
	isEmpty := has(status.Gone, name) && name != status.Placement.Standby && (status.Moving == nil || status.Moving.To != name)
	empty, more := placer.patience.lasts(emptiness(object)+name, isEmpty)
	if empty {
		return Empty, 0, nil
	}
	return "", earlier(left, more), nil
}

func emptiness(object v1alpha1.Protected) string { return "object " + string(object.GetUID()) + " on " }

// isSilent says whether nobody hears a host: neither Kubernetes of its operator and daemon, nor another daemon of its daemon.
func isSilent(name string, hosts map[string]*v1alpha1.DunlinHost) bool {
	if host := hosts[name]; host != nil && isHeard(host) {
		return false
	}
	for _, other := range hosts {
		for _, link := range other.Status.Links {
			if isHeard(other) && link.Host == name && link.Connected {
				return false
			}
		}
	}
	return true
}

// drained says whether somebody is making a copy's node empty. To cordon it is not enough: the Pod has to be gone from it.
func (placer *placer) drained(ctx context.Context, name string, pod *v1.Pod) (string, error) {
	if pod != nil && pod.Spec.NodeName == name && !isGone(pod) {
		return "", nil
	}
	node := &v1.Node{}
	if err := placer.Get(ctx, client.ObjectKey{Name: name}, node); err != nil || !node.Spec.Unschedulable {
		return "", client.IgnoreNotFound(err)
	}
	return Drained, nil
}

// wish is where the Pod of a placed copy is to be: where the copy is or goes, or on one of the hosts where it could go.
func (view view) wish(object v1alpha1.Protected, number int) []string {
	status := object.Seen()
	if view.seeksStandby(object, number) {
		return view.free
	}
	home := status.Placement.Homes()[number]
	switch {
	case view.keepsPod(object, home):
		return []string{home}
	case status.Moving != nil && status.Moving.From == home:
		return []string{status.Moving.To}
	case view.away[home] == "" || len(view.free) == 0 || !moves(object):
		return []string{home}
	}
	return view.free
}

// seeksStandby says whether a Pod is to find a node for the standby that is lacking. While a part lacks a host it keeps out of that one's way, on the witness's node; and
// where there is no host for either, a Pod that stands for the witness stays there.
func (view view) seeksStandby(object v1alpha1.Protected, number int) bool {
	placement := object.Seen().Placement
	return grows(object) && number == placement.Spare() && (number >= placement.Strength || len(view.free) > 0) && !view.lacksPart(object)
}

// moves says whether its parts can go to other hosts at all.
func moves(object v1alpha1.Protected) bool {
	return object.Seen().Placement.Witness != ""
}

// next is the part that is to be given to another host now, if there is one: a copy whose Pod has found a node, or the witness, and after these the place as standby.
func (placer *placer) next(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, view view) *v1alpha1.Moving {
	status := object.Seen()
	placement := status.Placement
	if status.Moving != nil || !moves(object) {
		return nil
	}
	for number, home := range placement.Homes() {
		why, part := view.away[home], PartBackup
		if home == placement.Witness {
			part = PartWitness
		}
		// Who serves it is handed over first, or its backup takes over. Nothing of a standby's can go anywhere.
		if why == "" || part == PartBackup && home == status.Primary || home == placement.Standby {
			continue
		}
		to := ""
		if standby := view.standby(object); standby != "" && part == PartBackup {
			if why == Lost && status.Standby == standby {
				// The daemons do it, and have begun long ago.
				continue
			}
			// They know of a host that is connected, and do not know that it should not have a copy; or they do not know of the standby.
			to = standby
		} else if number >= placement.Strength {
			to = placer.leastBusy(ctx, slices.Concat(view.free, view.others))
		} else if pod := pods[number]; pod != nil && !isGone(pod) && has(view.free, pod.Spec.NodeName) {
			to = pod.Spec.NodeName
		}
		if to != "" {
			return &v1alpha1.Moving{Part: part, From: home, To: to, Why: why}
		}
	}
	if number := slices.Index(placement.Homes(), placement.Standby); number >= 0 && pods[number] != nil && !isGone(pods[number]) {
		return view.nextStandby(object, pods[number].Spec.NodeName)
	}
	return nil
}

// explain says of each part that is not where it is to be, or cannot stay there, why.
func (view view) explain(object v1alpha1.Protected, pods map[int]*v1.Pod) (reason string, all []string) {
	status, kind := object.Seen(), kindOf(object)
	placement, moving := status.Placement, status.Moving
	reason = "NotCounted"
	for number, home := range placement.Homes() {
		part, what := fmt.Sprintf("copy %d", number), "the copy"
		switch home {
		case placement.Witness:
			part, what = "the witness", "the witness"
		case placement.Standby:
			part, what = "its place as standby", "the standby"
		}
		if moving != nil && moving.From == home {
			reason = "Moves"
			all = append(all, fmt.Sprintf("host '%s' %s: %s goes to host '%s'", home, isAway(view.away[home]), part, moving.To))
			continue
		}
		pod, why := pods[number], view.away[home]
		// Where its Pod has gone to look for a standby's place, a witness has none, and [host.carryOut] says what is lacking.
		stands := number >= placement.Strength || pod.Spec.NodeName == home && !isGone(pod) || why == "" && view.seeksStandby(object, number)
		keepsPod, isFree := view.keepsPod(object, home), (len(view.free) > 0 || number >= placement.Strength && len(view.others) > 0) && moves(object)
		switch {
		case why == "" && stands:
		case why == "":
			all = append(all, fmt.Sprintf("Pod '%s' does not stand on node '%s' for %s there", pod.Name, home, what))
		case home == placement.Standby && view.lacksPart(object):
			reason = "CannotMove"
			all = append(all, fmt.Sprintf("host '%s' %s: it stays the standby as long as another host of the %s is away", home, isAway(why), kind.word))
		case home == placement.Standby && keepsPod:
			reason = "CannotMove"
			all = append(all, fmt.Sprintf("host '%s' %s: it stays the standby, since none is asked for", home, isAway(why)))
		case keepsPod:
			reason = "Moves"
			all = append(all, fmt.Sprintf("host '%s' %s: %s goes to host '%s', the standby", home, isAway(why), part, placement.Standby))
		case isFree && number < placement.Strength && pod.Spec.NodeName == "":
			reason = "WaitsForPlace"
			all = append(all, fmt.Sprintf("host '%s' %s: %s waits for another node with room ('kubectl describe pod %s')", home, isAway(why), part, pod.Name))
		case isFree:
			all = append(all, fmt.Sprintf("host '%s' %s: %s goes to another host as soon as it can", home, isAway(why), part))
		case !moves(object):
			reason = "CannotMove"
			all = append(all, fmt.Sprintf("host '%s' %s: there is no second copy from which %s could be made anew", home, isAway(why), part))
		default:
			reason = "NoOtherNode"
			all = append(all, fmt.Sprintf("host '%s' %s: %s stays there, since no other host is heard that has no part in the %s%s", home, isAway(why), part, kind.word, view.couldNot()))
		}
		if why != "" && !stands && (!isFree || keepsPod) {
			all = append(all, fmt.Sprintf("Pod '%s' does not stand on node '%s' for %s there", pod.Name, home, what))
		}
	}
	return reason, all
}

// couldNot says of hosts that are heard and have no part why they cannot have one; nothing if there are none.
func (view view) couldNot() string {
	if len(view.lacks) == 0 {
		return ""
	}
	return " and could have one: " + saysLacks(view.lacks)
}

// isAway says why a host is; one that was, and is there again, is said to be.
func isAway(why string) string {
	if why == "" {
		return "was away and is there again"
	}
	return awayWords[why]
}
