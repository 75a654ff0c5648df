package operator

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// placer is the elected operator's part: Pods that stand for copies, which hosts a VM or a program has, and when a deleted object may go. In this file, what is
// said of a VM is meant of both.
//
// Flow: the finalizer -> Pods, which dunlin-scheduler places by agreement -> the hosts, written once (from then on a host's operator starts the VM) ->
// where a host is away for good, or drained, its Pod is made anew for another node, and where that has a place, it is written which part goes there ->
// deletion: the hosts' operators end the VM and say that they have nothing of it -> Pods and finalizer go.
//
// Invariants: 1. no Pod and no VM before the finalizer. 2. a VM's hosts are chosen once, by whoever is elected, and never for an object that is being
// deleted: a write that comes late meets another version of the object. Afterwards they are what its group says. 3. the finalizer goes when a majority of the
// VM's hosts have nothing of it, so that nobody can serve it any more, and neither has any host that is heard. 4. one part at a time goes to another host.
type placer struct {
	client.Client
	// live reads what is agreed in etcd, and not what a cache has.
	live   client.Reader
	events record.EventRecorder
	image  string
	// class is the priority of the Pods that stand for copies; nothing if they have none of their own.
	class string
	// patience is with hosts that are silent.
	patience *patience
	// refusals are of hosts that did not take a part.
	refusals *refusals
}

func (placer *placer) turn(ctx context.Context, object v1alpha1.Protected) (ctrl.Result, error) {
	if object.GetDeletionTimestamp() != nil {
		again, err := placer.finish(ctx, object)
		return ctrl.Result{RequeueAfter: again}, err
	}
	before := copyOf(object)
	if controllerutil.AddFinalizer(object, kindOf(object).finalizer) {
		return ctrl.Result{}, placer.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	}
	hosts, err := placer.hosts(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	pods, err := placer.pods(ctx, object)
	if err != nil {
		return ctrl.Result{}, err
	}
	seen, err := placer.see(ctx, object, pods, hosts)
	if err != nil {
		return ctrl.Result{}, err
	}
	if changed, err := placer.heed(ctx, object, &seen); changed || err != nil {
		return ctrl.Result{RequeueAfter: seen.again}, err
	}
	missing, err := placer.complete(ctx, object, pods, seen)
	if missing != "" {
		// Nobody tells when somebody else's Pod of that name is gone, or a quota has room.
		seen.again = earlier(seen.again, lookAgain)
	}
	switch {
	case err != nil:
	case object.Seen().Placement != nil:
		err = placer.look(ctx, object, pods, seen, missing)
	case missing != "":
		err = placer.say(ctx, object, "NoPods", missing)
	default:
		var again time.Duration
		again, err = placer.place(ctx, object, pods, hosts)
		seen.again = earlier(seen.again, again)
	}
	return ctrl.Result{RequeueAfter: seen.again}, err
}

func (placer *placer) place(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, hosts map[string]*v1alpha1.DunlinHost) (again time.Duration, err error) {
	kind := kindOf(object)
	placement, why := placer.choose(ctx, object, pods, hosts)
	if placement == nil {
		return 0, placer.say(ctx, object, "WaitsForPlaces", why)
	}
	if other := hasItAlready(object, placement, hosts); other != "" {
		// Nobody is told of each VM that a host has forgotten.
		return lookAgain, placer.say(ctx, object, "IsElsewhere", other)
	}
	err = change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
		status.Placement, status.VM, status.Witness, status.Standby = placement, NameOnHosts(object), placement.Witness, placement.Standby
		set(&status.Conditions, object.GetGeneration(), Placed, metav1.ConditionTrue, "Placed", itsHosts(placement))
	})
	if err == nil {
		standby := ""
		if placement.Standby != "" {
			standby = ", and its standby on " + placement.Standby
		}
		placer.events.Eventf(object, v1.EventTypeNormal, "Placed", "its copies have places on %s%s; on its hosts it is %s '%s'",
			strings.Join(placement.Members, " and "), standby, kind.word, NameOnHosts(object))
	}
	return 0, err
}

// hasItAlready says which host, beside those that a VM is to have, has said that it may have something of that very VM; nothing if none has. The VM has no hosts, as far
// as Kubernetes knows, and runs there all the same where somebody has brought an old state of Kubernetes back. It must not be started a second time elsewhere.
func hasItAlready(object v1alpha1.Protected, placement *v1alpha1.Placement, hosts map[string]*v1alpha1.DunlinHost) string {
	var others []string
	for name, host := range hosts {
		if remembers(host, object) && !has(placement.Hosts(), name) && name != placement.Standby {
			others = append(others, "'"+name+"'")
		}
	}
	if len(others) == 0 {
		return ""
	}
	slices.Sort(others)
	return fmt.Sprintf("host %[1]s may have it already, as '%[2]s', from before an old state of Kubernetes was brought back: it is not started on %[3]s as long as that is so. "+
		"'dunlin status' there says whether it runs, and 'dunlin down %[2]s' ends it", strings.Join(others, " and "), NameOnHosts(object), strings.Join(placement.Hosts(), ", "))
}

// say sets Placed to false, with the reason.
func (placer *placer) say(ctx context.Context, object v1alpha1.Protected, reason, why string) error {
	return change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
		set(&status.Conditions, object.GetGeneration(), Placed, metav1.ConditionFalse, reason, why)
		if status.State == "" {
			status.State = "waits for nodes"
		}
	})
}

func (placer *placer) hosts(ctx context.Context) (map[string]*v1alpha1.DunlinHost, error) {
	list := &v1alpha1.DunlinHostList{}
	err := placer.List(ctx, list)
	return byName(list), err
}

func byName(list *v1alpha1.DunlinHostList) map[string]*v1alpha1.DunlinHost {
	hosts := map[string]*v1alpha1.DunlinHost{}
	for at := range list.Items {
		hosts[list.Items[at].Name] = &list.Items[at]
	}
	return hosts
}

// choose returns the VM's hosts when all copies have nodes, or why it has none yet.
func (placer *placer) choose(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, hosts map[string]*v1alpha1.DunlinHost) (*v1alpha1.Placement, string) {
	var nodes, waiting []string
	for number := 0; number < object.Asked().Strength; number++ {
		pod := pods[number]
		if pod.Spec.NodeName == "" || isGone(pod) {
			waiting = append(waiting, fmt.Sprintf("'%s'", pod.Name))
		} else if host := hosts[pod.Spec.NodeName]; host == nil || !isHeard(host) {
			return nil, fmt.Sprintf("node '%s' has the place of copy %d, and no daemon of Dunlin's is heard there", pod.Spec.NodeName, number)
		}
		nodes = append(nodes, pod.Spec.NodeName)
	}
	if len(waiting) > 0 {
		why := fmt.Sprintf("no node yet for Pod %s: 'kubectl describe pod' says why", strings.Join(waiting, ", "))
		if few := tooFew(object, hosts); few != "" {
			why += "; " + few
		}
		return nil, why
	}
	placement := &v1alpha1.Placement{Members: nodes, Strength: object.Asked().Strength, Storage: object.Asked().Storage}
	if len(nodes) == 1 {
		return placement, ""
	}
	var free []string
	for name, host := range hosts {
		if isHeard(host) && !has(nodes, name) {
			free = append(free, name)
		}
	}
	placement.Witness = placer.leastBusy(ctx, free)
	switch {
	case len(nodes) > 2 && placement.Witness == "":
		// Three hosts are what a VM needs, so that the third one is the witness where there is no other: [host.carryOut] says what is lacking.
		placement.Members, placement.Witness = nodes[:2], nodes[2]
	case len(nodes) > 2:
		placement.Members, placement.Standby, placement.Copies = slices.Clone(nodes[:2]), nodes[2], nodes
	case placement.Witness == "":
		return nil, "no third node has a daemon of Dunlin's that is heard: two copies need a witness elsewhere"
	}
	return placement, ""
}

// leastBusy is, of these hosts, the one that is witness for the fewest VMs and programs.
func (placer *placer) leastBusy(ctx context.Context, free []string) string {
	busy := map[string]int{}
	for _, kind := range kinds {
		all, err := kind.all(ctx, placer)
		if err != nil {
			return ""
		}
		for _, object := range all {
			if placement := object.Seen().Placement; placement != nil {
				busy[placement.Witness]++
			}
		}
	}
	least := ""
	for _, name := range free {
		if least == "" || busy[name] < busy[least] || busy[name] == busy[least] && name < least {
			least = name
		}
	}
	return least
}

// look has parts go to other hosts where theirs are away, and says of a VM that has its hosts what nobody says who serves it: that its Pods are there, and
// that nobody serves it.
// missing is why a Pod could not be made, if one could not.
func (placer *placer) look(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, seen view, missing string) error {
	if changed, err := placer.grow(ctx, object, pods, seen); changed || err != nil {
		return err
	}
	if changed, err := placer.move(ctx, object, pods, seen); changed || err != nil {
		return err
	}
	placement, kind, hosts := object.Seen().Placement, kindOf(object), seen.hosts
	reason, waiting := "NoPods", []string{missing}
	if missing == "" {
		reason, waiting = seen.explain(object, pods)
	}
	serves, starts, gone := hosts[object.Seen().Primary], hosts[placement.Members[0]], 0
	for _, member := range placement.Members {
		if has(object.Seen().Gone, member) {
			gone++
		}
	}
	return change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
		if len(waiting) == 0 {
			set(&status.Conditions, object.GetGeneration(), Placed, metav1.ConditionTrue, "Placed", itsHosts(placement))
		} else {
			set(&status.Conditions, object.GetGeneration(), Placed, metav1.ConditionFalse, reason, sentences(waiting))
		}
		switch {
		case object.Seen().Started != nil && gone == len(placement.Members):
			status.State, status.Primary, status.Backup = "ended", "", ""
			why := fmt.Sprintf("the %[1]s has ended on its hosts: %[2]s, or somebody said 'dunlin down'. Delete the object, and make it again to start the %[1]s anew",
				kind.word, kind.ends)
			set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionFalse, "Ended", why)
			set(&status.Conditions, object.GetGeneration(), Protected, metav1.ConditionFalse, "Ended", "it does not run")
		case object.Seen().Primary != "" && (serves == nil || !isHeard(serves)):
			why := fmt.Sprintf("host '%s', which served it last, is not heard, and no other one says that it serves it", object.Seen().Primary)
			set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionUnknown, hostSilent, why)
			set(&status.Conditions, object.GetGeneration(), Protected, metav1.ConditionUnknown, hostSilent, why)
		case object.Seen().Started == nil && object.Seen().Primary == "" && (starts == nil || !isHeard(starts)):
			// That host has said nothing of it, or that it begins; whether it has begun it alone knows, so no other one may begin.
			why := fmt.Sprintf("host '%[1]s', which is to start it, is not heard: it waits for that host. Where that one does not come back, delete the object, and make it again", placement.Members[0])
			if running := meta.FindStatusCondition(status.Conditions, Running); running == nil || running.Reason == "Starting" {
				set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionUnknown, hostSilent, why)
			}
		}
	})
}

// hostSilent is the reason of Running and Protected where the host is silent that would say something else.
const hostSilent = "HostSilent"

// move writes which part goes to another host, or that none does where that one is away itself; and whether it has written something.
func (placer *placer) move(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, seen view) (bool, error) {
	moving, kind := object.Seen().Moving, kindOf(object)
	if moving != nil {
		why := seen.away[moving.To]
		isLast := moving.Part == PartStandby && seen.lacksPart(object)
		if !isLast && (why == "" || why == Drained) {
			return false, nil
		}
		err := change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) { status.Moving = nil })
		if err == nil && isLast {
			placer.events.Eventf(object, v1.EventTypeWarning, "NotMoved", "host %s does not get the %s that host %s had: another host of the %s is away, and its part comes first",
				moving.To, partWords[moving.Part], moving.From, kind.word)
		} else if err == nil {
			placer.events.Eventf(object, v1.EventTypeWarning, "NotMoved", "host %s %s, and does not get the %s that host %s had", moving.To, awayWords[why],
				partWords[moving.Part], moving.From)
		}
		return true, err
	}
	next := placer.next(ctx, object, pods, seen)
	if next == nil {
		return false, nil
	}
	err := change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
		// What that host says of itself from now on is said by one that knows that it will have a part.
		status.Moving, status.Gone = next, without(status.Gone, next.To)
	})
	if err == nil {
		meanwhile := ""
		if next.Part == PartBackup {
			meanwhile = fmt.Sprintf("; until that one's copy is complete the %s is unprotected", kind.word)
		}
		placer.events.Eventf(object, v1.EventTypeWarning, "Moves", "host %s %s: its %s goes to host %s%s", next.From, awayWords[next.Why], partWords[next.Part], next.To, meanwhile)
	}
	return true, err
}

// finish lets a deleted object go when its VM has ended (invariant 3), or says when to look again.
func (placer *placer) finish(ctx context.Context, object v1alpha1.Protected) (again time.Duration, err error) {
	kind := kindOf(object)
	if !controllerutil.ContainsFinalizer(object, kind.finalizer) {
		return 0, nil
	}
	if object.Seen().Placement != nil {
		hosts, err := placer.hosts(ctx)
		if err != nil {
			return 0, err
		}
		destroyed, again, err := placer.destroyed(ctx, object, hosts)
		if err != nil {
			return 0, err
		}
		if waits := holdUp(object, hosts, destroyed...); waits != "" {
			return again, change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
				// Whoever is left behind goes by what is said here.
				status.Gone = append(status.Gone, slices.DeleteFunc(destroyed, func(name string) bool { return has(status.Gone, name) })...)
				status.State = "ending"
				if running := meta.FindStatusCondition(status.Conditions, Running); running != nil && running.Reason == notEnded && strings.HasPrefix(waits, beingEnded(kind)) {
					// The host that ends it has said why it has not.
					return
				}
				set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionUnknown, "Ending", waits)
			})
		}
	}
	pods := &v1.PodList{}
	// A cache may not know one yet, and nobody would look again.
	if err := placer.live.List(ctx, pods, client.InNamespace(object.GetNamespace()), client.MatchingLabels{kind.label: object.GetName()}); err != nil {
		return 0, err
	}
	for at := range pods.Items {
		pod := &pods.Items[at]
		if !metav1.IsControlledBy(pod, object) {
			continue
		}
		// A node that is gone does not say that its Pod has ended, and nothing was in it.
		if err := placer.Delete(ctx, pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			return 0, err
		}
	}
	placer.patience.forget(emptiness(object))
	placer.refusals.forget(object)
	before := copyOf(object)
	controllerutil.RemoveFinalizer(object, kind.finalizer)
	return 0, client.IgnoreNotFound(placer.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

// destroyed are those of an object's hosts that are gone for good by an administrator's word: neither their node nor their DunlinHost is there, which an operator that runs
// makes anew at each beat, and nothing has been heard of them for as long as it takes to be lost; or how long that still takes of one.
func (placer *placer) destroyed(ctx context.Context, object v1alpha1.Protected, hosts map[string]*v1alpha1.DunlinHost) (destroyed []string, again time.Duration, err error) {
	for _, name := range object.Seen().Hosts() {
		lost, left := placer.patience.lasts("host "+name, isSilent(name, hosts))
		there := hosts[name] != nil
		for _, one := range []client.Object{&v1.Node{}, &v1alpha1.DunlinHost{}} {
			if there {
				break
			}
			err := placer.live.Get(ctx, client.ObjectKey{Name: name}, one)
			if client.IgnoreNotFound(err) != nil {
				return nil, 0, err
			}
			there = err == nil
		}
		switch {
		case there:
		case lost:
			destroyed = append(destroyed, name)
		default:
			again = earlier(again, left)
		}
	}
	return destroyed, again, nil
}

func beingEnded(kind *kind) string { return "the " + kind.word + " is being ended on host " }

// holdUp is what a deleted object waits for; nothing if it may go. Hosts that are destroyed have nothing of it.
func holdUp(object v1alpha1.Protected, hosts map[string]*v1alpha1.DunlinHost, destroyed ...string) string {
	word, status := kindOf(object).word, object.Seen()
	standbys, gone := status.Standbys(), append(slices.Clone(status.Gone), destroyed...)
	var heard, silent []string
	for _, name := range status.Hosts() {
		isThere := hosts[name] != nil && isHeard(hosts[name])
		switch {
		case has(destroyed, name):
		// A standby says that it has nothing yet. Once it is silent it may have got a part.
		case has(status.Gone, name) && (isThere || !has(standbys, name)):
		case isThere:
			heard = append(heard, "'"+name+"'")
		default:
			silent = append(silent, "'"+name+"'")
		}
	}
	if len(heard) > 0 {
		return beingEnded(kindOf(object)) + strings.Join(heard, " and ")
	}
	groups := [][]string{status.Placement.Hosts()}
	if moving := status.Moving; moving != nil && moving.Part != PartStandby {
		// The group may have gone on to its new hosts or not.
		groups = append(groups, instead(groups[0], moving.From, moving.To))
	}
	for _, group := range groups {
		if !mostAre(group, gone) {
			return fmt.Sprintf("host %s cannot be asked to end the %s, and without a majority of its hosts nobody can say that it has ended", strings.Join(silent, " and "), word) + forGood
		}
	}
	// A silent standby may have got either copy's part, and nobody that is heard has told.
	for _, standby := range standbys {
		if !has(silent, "'"+standby+"'") {
			continue
		}
		gone = without(gone, standby)
		for _, group := range slices.Clone(groups) {
			for _, member := range status.Placement.Members {
				if !has(group, standby) {
					groups = append(groups, instead(group, member, standby))
				}
			}
		}
	}
	for _, group := range groups {
		if !mostAre(group, gone) {
			return fmt.Sprintf("host %s cannot be asked to end the %s, and could serve it still, since one of them may have got a part as its standby", strings.Join(silent, " and "), word) + forGood
		}
	}
	return ""
}

// forGood says what a person does where one of the hosts is destroyed ([placer.destroyed]).
const forGood = ". One that is gone for good is waited for until 'kubectl delete node,dunlinhost NAME' says so"

// instead are hosts with one in another one's place.
func instead(hosts []string, of, comes string) []string {
	hosts = slices.Clone(hosts)
	if at := slices.Index(hosts, of); at >= 0 {
		hosts[at] = comes
	}
	return hosts
}

// mostAre says whether more than half of these are gone.
func mostAre(hosts, gone []string) bool {
	count := 0
	for _, name := range hosts {
		if has(gone, name) {
			count++
		}
	}
	return count > len(hosts)/2
}
