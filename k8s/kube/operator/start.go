package operator

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// muchLater is when it is looked again at what an administrator does not allow: nothing tells of another file, user or link on this node.
const muchLater = time.Minute

// start starts a VM on its hosts.
//
// The trap: what is written into an object has it looked at again, at once. So a VM that was refused is not tried again before its time, and nothing is written until
// then: neither "starting" over "refused", nor a second event for the same reason.
func (host *host) start(ctx context.Context, object v1alpha1.Protected) (ctrl.Result, error) {
	if left := host.startsIn(object, time.Now()); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	if _, err := host.limits.File(object); err != nil {
		// Neither a VM's hardware nor a program changes, and the node's files may.
		host.startsLater(object, muchLater)
		return ctrl.Result{RequeueAfter: muchLater}, host.refused(ctx, object, "NotAllowed", err)
	}
	if again, err := host.waitsForStandby(ctx, object); again > 0 || err != nil {
		return ctrl.Result{RequeueAfter: again}, err
	}
	if before := meta.FindStatusCondition(object.Seen().Conditions, Running); before == nil || before.Reason != "Refused" {
		err := change(ctx, host, object, func(status *v1alpha1.ProtectedStatus) {
			status.State = "starting"
			set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionFalse, "Starting", "it is being started on "+host.name)
		})
		if err != nil {
			return ctrl.Result{}, err
		}
	}
	// It may say so since long ago, and be gone by now.
	text, err := host.fileNow(ctx, object)
	if err != nil || text == "" {
		return ctrl.Result{RequeueAfter: soon}, err
	}
	ctx, end := context.WithTimeout(ctx, longest)
	defer end()
	if err := host.daemon.Up(ctx, object.GetName(), text); err != nil {
		host.startsLater(object, later)
		return ctrl.Result{RequeueAfter: later}, host.refused(ctx, object, "Refused", err)
	}
	// The daemon tells what becomes of it.
	return ctrl.Result{}, nil
}

// fileNow is a VM's file by its object as etcd has it; nothing if that is not to be started any more, or not as this host has it.
func (host *host) fileNow(ctx context.Context, object v1alpha1.Protected) (string, error) {
	now := kindOf(object).empty()
	if err := host.live.Get(ctx, client.ObjectKeyFromObject(object), now); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	if NameOnHosts(now) != NameOnHosts(object) || now.GetDeletionTimestamp() != nil || now.Seen().Started != nil ||
		!equality.Semantic.DeepEqual(now.Seen().Placement, object.Seen().Placement) {
		return "", nil
	}
	return host.limits.File(now)
}

// startsIn is how long a VM that could not be started is left alone still.
func (host *host) startsIn(object v1alpha1.Protected, now time.Time) time.Duration {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	return host.notStarted[NameOnHosts(object)].Sub(now)
}

func (host *host) startsLater(object v1alpha1.Protected, after time.Duration) {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	if host.notStarted == nil {
		host.notStarted = map[string]time.Time{}
	}
	host.notStarted[NameOnHosts(object)] = time.Now().Add(after)
}

// refused says why a VM is not started, once for each reason.
func (host *host) refused(ctx context.Context, object v1alpha1.Protected, reason string, why error) error {
	isNew := false
	err := change(ctx, host, object, func(status *v1alpha1.ProtectedStatus) {
		status.State = "refused"
		before := append([]metav1.Condition(nil), status.Conditions...)
		set(&status.Conditions, object.GetGeneration(), Running, metav1.ConditionFalse, reason, why.Error())
		isNew = !said(before, why.Error())
	})
	if err == nil && isNew {
		host.events.Event(object, v1.EventTypeWarning, reason, "it is not started: "+why.Error())
	}
	return err
}

func said(conditions []metav1.Condition, message string) bool {
	for _, condition := range conditions {
		if condition.Message == message {
			return true
		}
	}
	return false
}
