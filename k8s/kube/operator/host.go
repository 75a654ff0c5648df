package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

const (
	// soon is when an object that somebody else has changed is looked at again.
	soon = 100 * time.Millisecond
	// later is when a daemon that refused, or did not answer, is asked again.
	later = 5 * time.Second
	// longest is how long a daemon may take to do what it is asked: more than it gives itself.
	longest = 2 * time.Minute
	// handOver is how long nobody may lead a VM's group before its host says that it has no majority: while a VM is handed over nobody does for a moment.
	handOver = 2 * time.Second
)

// host is what every operator does for the VMs and programs in whose groups its own host is, elected or not: it asks the daemon beside it.
//
// Who speaks: the operator on the host that leads a VM's group writes the object's status, ends the VM and changes its policy. So it is agreed who
// speaks for the object, by those who agree who speaks for the VM: when a host dies with its operator, the one on the new primary goes on. It is the same for
// a program; in this file, what is said of a VM is meant of both.
//
// Invariants: 1. before a VM is started the object says "starting" (or "refused", where it was tried before), and is read once more, as etcd has it: it is not being
// deleted then. 2. a status of an earlier term never takes the place of a later one's. 3. what this host may have of a VM is written into its DunlinHost before the
// daemon can have it.
type host struct {
	client.Client
	// live reads what is agreed in etcd, and not what a cache has.
	live   client.Reader
	name   string
	daemon *control.Client
	report *report
	events record.EventRecorder
	limits Limits
	// grace is how long a guest may take to switch itself off.
	grace time.Duration
	mutex sync.Mutex
	// asked are the VMs whose guests were asked to switch themselves off, and in which term.
	asked map[string]uint64
	// orders are the newest ones to give parts in VMs to other hosts.
	orders map[string]told
	// refusals are of hosts that were to have parts in VMs.
	refusals map[string]refusedBy
	// led are the VMs whose groups this host leads, as its daemon said last.
	led map[string]bool
	// notStarted are VMs that were not started when this host tried, why, and when it may try again.
	notStarted map[string]notStarted
	// deleted are when this operator saw first that a VM's object is deleted, by its own clock.
	deleted map[string]time.Time
	// mute are since when each VM that this host served last is led by nobody, a time.Time by its name.
	mute sync.Map
	// alone is for how many beats in a row each VM was seen that nobody knows any more; only [host.tidy] uses it.
	alone map[string]int
}

func (host *host) look(ctx context.Context, object v1alpha1.Protected) (ctrl.Result, error) {
	placement := object.Seen().Placement
	// Who leads without being known as a host was brought in by hand.
	if placement == nil || !has(object.Seen().Hosts(), host.name) && !host.leads(NameOnHosts(object)) {
		return ctrl.Result{}, nil
	}
	if err := host.report.remember(ctx, object); err != nil {
		return ctrl.Result{}, err
	}
	status, err := host.daemon.Status(ctx)
	if err != nil {
		// The DunlinHost says that the daemon does not answer.
		return ctrl.Result{RequeueAfter: later}, nil
	}
	here, isHere := status.Find(NameOnHosts(object))
	switch {
	case isHere && object.GetDeletionTimestamp() != nil:
		return host.end(ctx, object, here)
	case isHere:
		return host.serve(ctx, object, here)
	case object.GetDeletionTimestamp() == nil && object.Seen().Started == nil:
		if host.name != placement.Members[0] {
			return ctrl.Result{}, nil
		}
		return host.start(ctx, object)
	case object.GetDeletionTimestamp() == nil && placement.Standby == host.name && (object.Seen().Moving == nil || object.Seen().Moving.To != host.name):
		// It has nothing, as long as both copies' hosts are there: nobody has to be told.
		return ctrl.Result{}, nil
	}
	forget(object)
	host.counts(NameOnHosts(object), "", nil)
	return ctrl.Result{}, change(ctx, host, object, func(status *v1alpha1.ProtectedStatus) {
		if !has(status.Gone, host.name) {
			status.Gone = append(status.Gone, host.name)
		}
	})
}

// speaks says whether this host is the one that leads the VM's group, as far as anybody has told. One that is cut off from the others believes so for
// longer than they do: the object has a later term then.
func (host *host) speaks(object v1alpha1.Protected, here control.VM) bool {
	return here.Leader == host.name && int64(here.Term) >= object.Seen().Term
}

// servedLast says whether this host's copy was the last one that served, as far as anybody has told, and serves no more: it has failed, or its host has no majority
// of the group. Where both copies have failed, or two of three hosts are silent, nobody leads any more, and so nobody speaks. Whoever leads in a later term after all has
// the last word.
func (host *host) servedLast(object v1alpha1.Protected, here control.VM) bool {
	serves := here.State != "failed" && (here.State != "quorum-lost" || here.Role != "primary")
	return here.Leader == "" && !serves && object.Seen().Primary == host.name && int64(here.Term) >= object.Seen().Term
}

// standBy says what a host has to say that does not lead: that nobody serves what it served last, and else only that it has something of it.
func (host *host) standBy(ctx context.Context, object v1alpha1.Protected, here control.VM) (ctrl.Result, error) {
	host.counts(here.Name, "", nil)
	if !host.servedLast(object, here) {
		host.mute.Delete(here.Name)
		forget(object)
		return ctrl.Result{}, change(ctx, host, object, func(status *v1alpha1.ProtectedStatus) { status.Gone = without(status.Gone, host.name) })
	}
	since, _ := host.mute.LoadOrStore(here.Name, time.Now())
	if left := handOver - time.Since(since.(time.Time)); here.State != "failed" && left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	isSilent, err := host.isSilent(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	kindOf(object).protected.WithLabelValues(object.GetNamespace(), object.GetName()).Set(0)
	why := fmt.Sprintf("its copy on host '%s', which served it last, has ended", host.name)
	if here.State != "failed" {
		why = fmt.Sprintf("host '%s', which served it last, has no majority of its hosts", host.name)
	}
	again := ctrl.Result{}
	if isSilent {
		again.RequeueAfter = later
	}
	return again, change(ctx, host, object, func(status *v1alpha1.ProtectedStatus) {
		words := slices.Clone(status.Conditions)
		status.State, status.Backup, status.Gone = here.State, "", without(status.Gone, host.name)
		why := fmt.Sprintf("%s, and that host knows of none that leads its group: %s", why, here.Says())
		set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionFalse, reason(here.State), why)
		set(&status.Conditions, object.GetGeneration(), Protected, metav1.ConditionFalse, reason(here.State), "it does not run")
		if isSilent {
			keepSilence(words, &status.Conditions)
		}
	})
}

// serve says how a VM is, and carries out what is asked of it, if this host leads its group.
func (host *host) serve(ctx context.Context, object v1alpha1.Protected, here control.VM) (ctrl.Result, error) {
	if !host.speaks(object, here) {
		return host.standBy(ctx, object, here)
	}
	host.mute.Delete(here.Name)
	asAsked, again := host.carryOut(ctx, object, here)
	here, refused, moved := host.move(ctx, object, here)
	if again = earlier(again, moved); refused != "" {
		asAsked = append(asAsked, refused)
	}
	stays := host.stays(ctx, object, here)
	isSilent, err := host.isSilent(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	if isSilent {
		again = earlier(again, later)
	}
	before, moving, placement, kind := object.Seen().Primary, object.Seen().Moving, object.Seen().Placement, kindOf(object)
	err = change(ctx, host, object, func(status *v1alpha1.ProtectedStatus) {
		host.followGroup(here, stays, status)
		shrink(object.Asked().Strength, here, status)
		host.tellRefusal(object, here, status)
		words := slices.Clone(status.Conditions)
		host.tell(object, here, asAsked, status)
		if isSilent {
			keepSilence(words, &status.Conditions)
		}
	})
	if err != nil {
		return ctrl.Result{}, err
	}
	host.tellOfMove(object, moving, placement)
	if before != "" && before != object.Seen().Primary {
		host.events.Eventf(object, v1.EventTypeWarning, "FailedOver", "host %s serves the %s since %s; before it was host %s",
			host.name, kind.word, object.Seen().LastFailOver.UTC().Format("15:04:05 UTC"), before)
		kind.failOvers.WithLabelValues(object.GetNamespace(), object.GetName()).Inc()
	}
	kind.protected.WithLabelValues(object.GetNamespace(), object.GetName()).Set(map[bool]float64{true: 1}[here.Protected])
	if here.Protected {
		drained, err := host.drain(ctx, object)
		return ctrl.Result{RequeueAfter: earlier(again, drained)}, err
	}
	return ctrl.Result{RequeueAfter: again}, nil
}

// isSilent says whether this host counts as silent although it speaks: its DunlinHost was not written for a while.
func (host *host) isSilent(ctx context.Context) (bool, error) {
	own := &v1alpha1.DunlinHost{}
	err := host.Get(ctx, client.ObjectKey{Name: host.name}, own)
	return err != nil || !isHeard(own), client.IgnoreNotFound(err)
}

// keepSilence leaves what the elected operator says of a silent host ([placer.look]) until that host is heard again: of two who write a condition in turns each would
// have the other one look again, without end.
func keepSilence(before []metav1.Condition, now *[]metav1.Condition) {
	for _, condition := range before {
		if condition.Reason == hostSilent {
			meta.SetStatusCondition(now, condition)
		}
	}
}

func (host *host) leads(vm string) bool {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	return host.led[vm]
}

func (host *host) setLed(led map[string]bool) {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	host.led = led
}

func earlier(one, other time.Duration) time.Duration {
	if one == 0 || other != 0 && other < one {
		return other
	}
	return one
}

// tell writes how a VM is that this host serves.
func (host *host) tell(object v1alpha1.Protected, here control.VM, asAsked []string, status *v1alpha1.ProtectedStatus) {
	now := metav1.Now().Rfc3339Copy()
	if status.Started == nil {
		status.Started = &now
	}
	if here.Role == "primary" {
		if status.Primary != "" && status.Primary != host.name {
			status.LastFailOver = &now
		}
		status.Primary = host.name
	}
	status.State, status.Term, status.Witness, status.Standby = here.State, int64(here.Term), status.Placement.Witness, here.Standby
	status.ObservedGeneration, status.Gone = object.GetGeneration(), without(status.Gone, host.name)
	status.Backup, status.Strength = "", 1
	if here.Protected {
		status.Backup, status.Strength = without(status.Placement.Members, host.name)[0], 2
	}
	word := here.State
	runs := here.Role == "primary" && word != "starting" && word != "quorum-lost" && word != "stopped" && word != "failed"
	why := fmt.Sprintf("host '%s' serves it", host.name)
	if !runs {
		why = fmt.Sprintf("host '%s' leads its group and does not serve it: %s", host.name, here.Says())
	}
	set(&status.Conditions, object.GetGeneration(), Running, truth(runs), reason(word), why)
	switch {
	case here.Protected:
		set(&status.Conditions, object.GetGeneration(), Protected, metav1.ConditionTrue, "SecondCopy", fmt.Sprintf("host '%s' holds a complete second copy", status.Backup))
	case here.Policy == "none":
		set(&status.Conditions, object.GetGeneration(), Protected, metav1.ConditionFalse, "NotAsked", "its policy is none: if its host dies, it is lost")
	case here.JoinProblem != nil:
		set(&status.Conditions, object.GetGeneration(), Protected, metav1.ConditionFalse, "NoBackupJoins", "no backup joins: "+here.JoinProblem.Why)
	default:
		set(&status.Conditions, object.GetGeneration(), Protected, metav1.ConditionFalse, "NoSecondCopy", "there is no complete second copy: if its host dies now, it is lost")
	}
	if len(asAsked) == 0 {
		set(&status.Conditions, object.GetGeneration(), AsAsked, metav1.ConditionTrue, "CarriedOut", "it runs as its spec says")
	} else {
		set(&status.Conditions, object.GetGeneration(), AsAsked, metav1.ConditionFalse, "NotCarriedOut", sentences(asAsked))
	}
}

// carryOut changes what a daemon can change while a VM runs, and returns what it cannot.
func (host *host) carryOut(ctx context.Context, object v1alpha1.Protected, here control.VM) (cannot []string, again time.Duration) {
	placement := object.Seen().Placement
	if object.Asked().Policy != here.Policy && here.Role == "primary" {
		ctx, end := context.WithTimeout(ctx, longest)
		defer end()
		err := host.daemon.Policy(ctx, here.Name, object.Asked().Policy)
		if err == nil {
			host.events.Eventf(object, v1.EventTypeNormal, "PolicyChanged", "its policy was %s and is %s now", here.Policy, object.Asked().Policy)
		} else {
			cannot, again = append(cannot, fmt.Sprintf("policy %s: %v", object.Asked().Policy, err)), later
		}
	}
	if object.Asked().Storage != placement.Storage {
		cannot = append(cannot, fmt.Sprintf("storage is %s until the VM is made anew", placement.Storage))
	}
	switch {
	case lacksStandby(object):
		cannot = append(cannot, "it has no standby yet: that waits for a node with room whose host is heard and has no part in it")
	case object.Asked().Strength > placement.Strength && object.Asked().Strength > len(placement.Members):
		cannot = append(cannot, fmt.Sprintf("it was placed with strength %d, and gets no further hosts while it exists", placement.Strength))
	}
	refused, sooner := host.nameStandby(ctx, object, here)
	if refused != "" {
		cannot = append(cannot, refused)
	}
	return cannot, earlier(again, sooner)
}

// drain hands a VM over that this host serves when its node is being drained: it is cordoned, and the Pod that stood for the copy is gone from it; or when its
// node is no more.
func (host *host) drain(ctx context.Context, object v1alpha1.Protected) (time.Duration, error) {
	node, why := &v1.Node{}, "is being drained"
	err := host.Get(ctx, client.ObjectKey{Name: host.name}, node)
	switch {
	case apierrors.IsNotFound(err):
		why = "was deleted"
	case err != nil || !node.Spec.Unschedulable:
		return 0, err
	default:
		if stands, err := host.stands(ctx, object); stands || err != nil {
			return 0, err
		}
	}
	other := &v1.Node{}
	err = host.Get(ctx, client.ObjectKey{Name: object.Seen().Backup}, other)
	if err != nil || other.Spec.Unschedulable {
		// There is no better place.
		return later, client.IgnoreNotFound(err)
	}
	ctx, end := context.WithTimeout(ctx, longest)
	defer end()
	if err := host.daemon.Failover(ctx, NameOnHosts(object)); err != nil {
		host.events.Eventf(object, v1.EventTypeWarning, "NotHandedOver", "node %s %s, and the %s stays there for now: %v", host.name, why, kindOf(object).word, err)
		return later, nil
	}
	host.events.Eventf(object, v1.EventTypeNormal, "HandedOver", "node %s %s: the %s goes to host %s", host.name, why, kindOf(object).word, object.Seen().Backup)
	return 0, nil
}

// stands says whether the Pod of this host's copy is on its node.
func (host *host) stands(ctx context.Context, object v1alpha1.Protected) (bool, error) {
	number := slices.Index(object.Seen().Placement.Homes(), host.name)
	if number < 0 {
		// It has come a moment ago.
		return true, nil
	}
	pod := &v1.Pod{}
	err := host.Get(ctx, client.ObjectKey{Namespace: object.GetNamespace(), Name: podName(object, number)}, pod)
	return err == nil && pod.Spec.NodeName == host.name && !isGone(pod), client.IgnoreNotFound(err)
}

// end ends the VM of a deleted object: its guest is asked, and after a while it is not asked any more.
func (host *host) end(ctx context.Context, object v1alpha1.Protected, here control.VM) (ctrl.Result, error) {
	forget(object)
	// Also where another host leads: its time does not begin anew when this one does.
	left := host.graceLeft(here.Name, time.Now())
	// It may have got its part since it said that it has nothing: as a standby.
	err := change(ctx, host, object, func(status *v1alpha1.ProtectedStatus) { status.Gone = without(status.Gone, host.name) })
	if err != nil {
		return ctrl.Result{}, err
	}
	again := ctrl.Result{RequeueAfter: later}
	if isLeftBehind(object, here, host.name) {
		ctx, end := context.WithTimeout(ctx, longest)
		defer end()
		return again, host.daemon.Forget(ctx, here.Name)
	}
	if here.Leader != "" && !host.speaks(object, here) || here.Leader == "" && here.Role == "witness" {
		return again, nil
	}
	if left > 0 {
		again.RequeueAfter = left
	}
	// A guest is asked once by each leader.
	if !host.asks(here, left <= 0) {
		return again, nil
	}
	ctx, end := context.WithTimeout(ctx, longest)
	defer end()
	err = host.daemon.Down(ctx, here.Name, left <= 0)
	if err != nil {
		again.RequeueAfter = later
		host.forgetAsked(here.Name)
	}
	var refused *control.Refused
	if errors.As(err, &refused) {
		return again, change(ctx, host, object, func(status *v1alpha1.ProtectedStatus) {
			set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionUnknown, notEnded, refused.Why)
		})
	}
	return again, nil
}

// notEnded is the reason of Running where the daemon of the host that ends a VM refuses to. The elected operator leaves that as it is while that host is heard.
const notEnded = "NotEnded"

// isLeftBehind says whether a deleted object's VM is on this host alone: it was away while the VM ended, and nobody is left who could tell it, or lead with it.
func isLeftBehind(object v1alpha1.Protected, here control.VM, name string) bool {
	status := object.Seen()
	others := append(without(status.Hosts(), name), status.Standbys()...)
	for _, peer := range here.Peers {
		others = append(others, peer.Host)
	}
	return here.Leader == "" && status.Moving == nil && !slices.ContainsFunc(others, func(other string) bool {
		return other != name && !has(status.Gone, other)
	})
}

func (host *host) asks(here control.VM, now bool) bool {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	if term, asked := host.asked[here.Name]; asked && term == here.Term && !now {
		return false
	}
	host.asked[here.Name] = here.Term
	return true
}

func (host *host) forgetAsked(vm string) {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	delete(host.asked, vm)
}

// graceLeft is for how long the guest of a deleted object's VM may still take to switch itself off. It begins when this operator sees the deletion: the API server's clock
// is another one, and where that is behind, no guest would be asked.
func (host *host) graceLeft(vm string, now time.Time) time.Duration {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	since, known := host.deleted[vm]
	if !known {
		if host.deleted == nil {
			host.deleted = map[string]time.Time{}
		}
		since = now
		host.deleted[vm] = now
	}
	return host.grace - now.Sub(since)
}

// forgetAll leaves out what is remembered of a VM that is no more.
func (host *host) forgetAll(vm string) {
	host.forgetAsked(vm)
	host.mute.Delete(vm)
	host.mutex.Lock()
	defer host.mutex.Unlock()
	delete(host.deleted, vm)
	delete(host.notStarted, vm)
	delete(host.orders, vm)
	delete(host.refusals, vm)
}
