package operator

import (
	"context"
	"fmt"
	"sort"
	"strings"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/scheduler"
)

// placer is the elected operator's part: Pods that stand for copies, which hosts a VM or a program has, and when a deleted object may go. In this file, what is
// said of a VM is meant of both.
//
// Flow: the finalizer -> Pods, which dunlin-scheduler places by agreement -> the hosts, written once (from then on a host's operator starts the VM) ->
// deletion: the hosts' operators end the VM and say that they have nothing of it -> Pods and finalizer go.
//
// Invariants: 1. no Pod and no VM before the finalizer. 2. a VM's hosts are written once, by whoever is elected, and never to an object that is being
// deleted: a write that comes late meets another version of the object. 3. the finalizer goes when a majority of the VM's hosts have nothing of it, so that
// nobody can serve it any more, and neither has any host that is heard.
type placer struct {
	client.Client
	// live reads what is agreed in etcd, and not what a cache has.
	live   client.Reader
	events record.EventRecorder
	image  string
}

func (placer *placer) turn(ctx context.Context, object v1alpha1.Protected) (ctrl.Result, error) {
	if object.GetDeletionTimestamp() != nil {
		return ctrl.Result{}, placer.finish(ctx, object)
	}
	return ctrl.Result{}, placer.place(ctx, object)
}

func (placer *placer) place(ctx context.Context, object v1alpha1.Protected) error {
	before, kind := copyOf(object), kindOf(object)
	if controllerutil.AddFinalizer(object, kind.finalizer) {
		return placer.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	}
	placement := object.Seen().Placement
	strength := object.Asked().Strength
	if placement != nil {
		strength = placement.Strength
	}
	pods, missing, err := placer.pods(ctx, object, strength)
	if err != nil || missing != "" {
		return placer.say(ctx, object, "NoPods", missing, err)
	}
	hosts, err := placer.hosts(ctx)
	if err != nil {
		return err
	}
	if placement != nil {
		return placer.look(ctx, object, pods, hosts)
	}
	placement, why := placer.choose(ctx, object, pods, hosts)
	if placement == nil {
		return placer.say(ctx, object, "WaitsForPlaces", why, nil)
	}
	err = change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
		status.Placement, status.VM, status.Witness = placement, NameOnHosts(object), placement.Witness
		set(&status.Conditions, object.GetGeneration(), Placed, metav1.ConditionTrue, "Placed", "its hosts are "+strings.Join(placement.Hosts(), ", "))
	})
	if err == nil {
		placer.events.Eventf(object, v1.EventTypeNormal, "Placed", "its copies have places on %s; on its hosts it is %s '%s'",
			strings.Join(placement.Members, " and "), kind.word, NameOnHosts(object))
	}
	return err
}

// say sets Placed to false, with the reason.
func (placer *placer) say(ctx context.Context, object v1alpha1.Protected, reason, why string, err error) error {
	if err != nil {
		return err
	}
	return change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
		set(&status.Conditions, object.GetGeneration(), Placed, metav1.ConditionFalse, reason, why)
		if status.State == "" {
			status.State = "waits for nodes"
		}
	})
}

// pods returns the VM's, by copy, and makes those that are missing; or it says why one cannot be made.
func (placer *placer) pods(ctx context.Context, object v1alpha1.Protected, strength int) (map[int]*v1.Pod, string, error) {
	list, kind := &v1.PodList{}, kindOf(object)
	if err := placer.List(ctx, list, client.InNamespace(object.GetNamespace()), client.MatchingLabels{kind.label: object.GetName()}); err != nil {
		return nil, "", err
	}
	pods, placement := map[int]*v1.Pod{}, object.Seen().Placement
	for at := range list.Items {
		pod := &list.Items[at]
		number := numberOf(pod)
		if !metav1.IsControlledBy(pod, object) {
			continue
		}
		// Another strength was asked for before it was placed, or there is another number of copies: those Pods are of no use.
		ofNoUse := number < 0 || number >= strength || placement == nil && pod.Labels[scheduler.StrengthLabel] != fmt.Sprint(strength)
		if ofNoUse || isGone(pod) && pod.DeletionTimestamp == nil {
			if err := placer.Delete(ctx, pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
				return nil, "", err
			}
			continue
		}
		pods[number] = pod
	}
	for number := 0; number < strength; number++ {
		if pods[number] != nil {
			continue
		}
		on := ""
		if placement != nil {
			on = placement.Hosts()[number]
		}
		made := pod(object, number, strength, on, placer.image)
		err := placer.Create(ctx, made)
		if apierrors.IsAlreadyExists(err) {
			there := &v1.Pod{}
			if err = placer.live.Get(ctx, client.ObjectKeyFromObject(made), there); err == nil && !metav1.IsControlledBy(there, object) {
				return nil, fmt.Sprintf("Pod '%s' is there already, and is somebody else's: delete it, or give the %s another name", made.Name, kind.name), nil
			}
			made = there
		}
		if client.IgnoreNotFound(err) != nil {
			if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
				return nil, fmt.Sprintf("Pod '%s' cannot be made: %v", made.Name, err), nil
			}
			return nil, "", err
		}
		pods[number] = made
	}
	return pods, "", nil
}

func (placer *placer) hosts(ctx context.Context) (map[string]*v1alpha1.DunlinHost, error) {
	list := &v1alpha1.DunlinHostList{}
	err := placer.List(ctx, list)
	hosts := map[string]*v1alpha1.DunlinHost{}
	for at := range list.Items {
		hosts[list.Items[at].Name] = &list.Items[at]
	}
	return hosts, err
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
		return nil, fmt.Sprintf("no node yet for Pod %s: 'kubectl describe pod' says why", strings.Join(waiting, ", "))
	}
	placement := &v1alpha1.Placement{Members: nodes, Strength: object.Asked().Strength, Storage: object.Asked().Storage}
	switch {
	case len(nodes) == 1:
		return placement, ""
	case len(nodes) > 2:
		// A daemon has no standby yet: the third copy's host is the witness.
		placement.Members, placement.Witness = nodes[:2], nodes[2]
		return placement, ""
	}
	placement.Witness = placer.witness(ctx, nodes, hosts)
	if placement.Witness == "" {
		return nil, "no third node has a daemon of Dunlin's that is heard: two copies need a witness elsewhere"
	}
	return placement, ""
}

// witness is the host that is one for the fewest VMs and programs, of those that have none of the copies.
func (placer *placer) witness(ctx context.Context, members []string, hosts map[string]*v1alpha1.DunlinHost) string {
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
	var free []string
	for name, host := range hosts {
		if isHeard(host) && !has(members, name) {
			free = append(free, name)
		}
	}
	sort.Slice(free, func(i, j int) bool {
		return busy[free[i]] < busy[free[j]] || busy[free[i]] == busy[free[j]] && free[i] < free[j]
	})
	if len(free) == 0 {
		return ""
	}
	return free[0]
}

// look says of a VM that has its hosts what nobody says who serves it: that its Pods are there, and that nobody serves it.
func (placer *placer) look(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, hosts map[string]*v1alpha1.DunlinHost) error {
	placement, kind := object.Seen().Placement, kindOf(object)
	var waiting []string
	for number := 0; number < placement.Strength; number++ {
		on := placement.Hosts()[number]
		if pod := pods[number]; pod.Spec.NodeName != on || isGone(pod) {
			waiting = append(waiting, fmt.Sprintf("Pod '%s' does not stand on node '%s' for the copy there", pod.Name, on))
		}
	}
	serves, gone := hosts[object.Seen().Primary], 0
	for _, member := range placement.Members {
		if has(object.Seen().Gone, member) {
			gone++
		}
	}
	return change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
		if len(waiting) == 0 {
			set(&status.Conditions, object.GetGeneration(), Placed, metav1.ConditionTrue, "Placed", "its hosts are "+strings.Join(placement.Hosts(), ", "))
		} else {
			set(&status.Conditions, object.GetGeneration(), Placed, metav1.ConditionFalse, "NotCounted", strings.Join(waiting, "; "))
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
			set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionUnknown, "HostSilent", why)
			set(&status.Conditions, object.GetGeneration(), Protected, metav1.ConditionUnknown, "HostSilent", why)
		}
	})
}

// finish lets a deleted object go when its VM has ended (invariant 3).
func (placer *placer) finish(ctx context.Context, object v1alpha1.Protected) error {
	kind := kindOf(object)
	if !controllerutil.ContainsFinalizer(object, kind.finalizer) {
		return nil
	}
	if object.Seen().Placement != nil {
		hosts, err := placer.hosts(ctx)
		if err != nil {
			return err
		}
		if waits := holdUp(object, hosts); waits != "" {
			return change(ctx, placer, object, func(status *v1alpha1.ProtectedStatus) {
				status.State = "ending"
				set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionUnknown, "Ending", waits)
			})
		}
	}
	pods := &v1.PodList{}
	// A cache may not know one yet, and nobody would look again.
	if err := placer.live.List(ctx, pods, client.InNamespace(object.GetNamespace()), client.MatchingLabels{kind.label: object.GetName()}); err != nil {
		return err
	}
	for at := range pods.Items {
		pod := &pods.Items[at]
		if !metav1.IsControlledBy(pod, object) {
			continue
		}
		// A node that is gone does not say that its Pod has ended, and nothing was in it.
		if err := placer.Delete(ctx, pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	before := copyOf(object)
	controllerutil.RemoveFinalizer(object, kind.finalizer)
	return client.IgnoreNotFound(placer.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

// holdUp is what a deleted object waits for; nothing if it may go.
func holdUp(object v1alpha1.Protected, hosts map[string]*v1alpha1.DunlinHost) string {
	all, word := object.Seen().Placement.Hosts(), kindOf(object).word
	gone := 0
	var heard, silent []string
	for _, name := range all {
		host := hosts[name]
		switch {
		case has(object.Seen().Gone, name):
			gone++
		case host != nil && isHeard(host):
			heard = append(heard, "'"+name+"'")
		default:
			silent = append(silent, "'"+name+"'")
		}
	}
	if len(heard) > 0 {
		return "the " + word + " is being ended on host " + strings.Join(heard, " and ")
	}
	if gone <= len(all)/2 {
		return fmt.Sprintf("host %s cannot be asked to end the %s, and without a majority of its hosts nobody can say that it has ended", strings.Join(silent, " and "), word)
	}
	return ""
}
