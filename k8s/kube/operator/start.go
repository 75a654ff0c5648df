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
// then: neither "starting" over "refused", nor a second event for the same reason. Only the refusal itself is, if somebody else was writing when it was to be said.
func (host *host) start(ctx context.Context, object v1alpha1.Protected) (ctrl.Result, error) {
	if known := host.startsIn(object); time.Until(known.until) > 0 {
		return ctrl.Result{RequeueAfter: time.Until(known.until)}, host.refused(ctx, object, known.reason, known.why)
	}
	if _, err := host.limits.File(object); err != nil {
		// Neither a VM's hardware nor a program changes, and the node's files may.
		return host.startsLater(ctx, object, muchLater, "NotAllowed", err)
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
		return host.startsLater(ctx, object, later, "Refused", err)
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

// notStarted is why a VM was not started, and until when it is left alone.
type notStarted struct {
	until  time.Time
	reason string
	why    error
}

// startsIn says of a VM that could not be started until when it is left alone.
func (host *host) startsIn(object v1alpha1.Protected) notStarted {
	host.mutex.Lock()
	defer host.mutex.Unlock()
	return host.notStarted[NameOnHosts(object)]
}

// startsLater says why a VM is not started, and leaves it alone for a while.
func (host *host) startsLater(ctx context.Context, object v1alpha1.Protected, after time.Duration, reason string, why error) (ctrl.Result, error) {
	host.mutex.Lock()
	if host.notStarted == nil {
		host.notStarted = map[string]notStarted{}
	}
	host.notStarted[NameOnHosts(object)] = notStarted{time.Now().Add(after), reason, why}
	host.mutex.Unlock()
	return ctrl.Result{RequeueAfter: after}, host.refused(ctx, object, reason, why)
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
