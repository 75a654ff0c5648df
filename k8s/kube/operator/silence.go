package operator

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// silence is the elected operator's part with DunlinHosts: one that says nothing for a while is not Ready any more. Clocks of hosts are not compared: what
// counts is when this operator saw the last change.
type silence struct {
	client.Client
	// after is how long a host may say nothing.
	after time.Duration
	mutex sync.Mutex
	last  map[string]word
}

// word is what a host said last, and when this operator saw it.
type word struct {
	heard metav1.Time
	seen  time.Time
}

func (silence *silence) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	host := &v1alpha1.DunlinHost{}
	if err := silence.Get(ctx, request.NamespacedName, host); err != nil {
		silence.mutex.Lock()
		delete(silence.last, request.Name)
		silence.mutex.Unlock()
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if left := silence.left(host); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	ready := meta.FindStatusCondition(host.Status.Conditions, Ready)
	if ready != nil && ready.Status == metav1.ConditionUnknown {
		return ctrl.Result{}, nil
	}
	before := host.DeepCopy()
	why := fmt.Sprintf("its operator has said nothing for %s", silence.after)
	set(&host.Status.Conditions, host.Generation, Ready, metav1.ConditionUnknown, "Silent", why)
	return settle(ctrl.Result{}, silence.Status().Patch(ctx, host, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

// left is how long a host may still be silent.
func (silence *silence) left(host *v1alpha1.DunlinHost) time.Duration {
	silence.mutex.Lock()
	defer silence.mutex.Unlock()
	var heard metav1.Time
	if host.Status.Heard != nil {
		heard = *host.Status.Heard
	}
	known, there := silence.last[host.Name]
	if !there || !known.heard.Equal(&heard) {
		known = word{heard, time.Now()}
		silence.last[host.Name] = known
	}
	return silence.after - time.Since(known.seen)
}
