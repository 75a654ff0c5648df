package scheduler

import (
	"context"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// runtimeObject calls with what an object is.
func runtimeObject[Kind any](call func(*Kind)) func(unstructured.Unstructured) error {
	return func(object unstructured.Unstructured) error {
		one := new(Kind)
		err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, one)
		if err == nil {
			call(one)
		}
		return err
	}
}

// within is what a DunlinHost says that copies may take of a node; one without one gives all that it has.
func within(room allocation.Resources, limit v1alpha1.DunlinHostSpec) allocation.Resources {
	if limit.MemoryMiB != nil {
		room.MemoryMiB = min(room.MemoryMiB, *limit.MemoryMiB)
	}
	if limit.DiskMiB != nil {
		room.DiskMiB = min(room.DiskMiB, *limit.DiskMiB)
	}
	return room
}

// readQuotas returns what namespaces may have, where somebody has said so.
func (cluster cluster) readQuotas(ctx context.Context) (map[string]v1alpha1.ReplicaQuotaSpec, error) {
	quotas, statuses := map[string]v1alpha1.ReplicaQuotaSpec{}, map[string]v1alpha1.ReplicaQuotaStatus{}
	err := each(ctx, cluster.quotas, func(object unstructured.Unstructured) error {
		var quota v1alpha1.ReplicaQuota
		err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &quota)
		quotas[quota.Namespace], statuses[quota.Namespace] = quota.Spec, quota.Status
		return err
	})
	cluster.mutex.Lock()
	defer cluster.mutex.Unlock()
	cluster.statuses = statuses
	return quotas, err
}

// each calls for all objects of a kind; there are none where nobody has made the kind known.
func each(ctx context.Context, kind dynamic.ResourceInterface, call func(unstructured.Unstructured) error) error {
	list, err := kind.List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, object := range list.Items {
		if err := call(object); err != nil {
			return fmt.Errorf("%s '%s': %w", object.GetKind(), object.GetName(), err)
		}
	}
	return nil
}

// quotaOf is what a quota leaves of the whole cluster.
func quotaOf(whole allocation.Resources, spec v1alpha1.ReplicaQuotaSpec) allocation.Resources {
	for amount, limit := range map[*int64]*int64{&whole.MilliCPU: spec.MilliCPU, &whole.MemoryMiB: spec.MemoryMiB, &whole.DiskMiB: spec.DiskMiB} {
		if limit != nil {
			*amount = min(*amount, *limit)
		}
	}
	return whole
}

// tellOffers keeps the newest word for [Plugin.writeOffers]; the controller does not wait for it.
func (plugin *Plugin) tellOffers(offers map[string]allocation.Offer) {
	select {
	case <-plugin.offered:
	default:
	}
	select {
	case plugin.offered <- offers:
	default:
	}
}

// writeOffers writes into each quota's status what differs from what the last look has found there. It is the leading controller's word: whoever led
// before may write once more, and the next look finds it.
func (plugin *Plugin) writeOffers(ctx context.Context) {
	for {
		var offers map[string]allocation.Offer
		select {
		case <-ctx.Done():
			return
		case offers = <-plugin.offered:
		}
		for namespace, offer := range offers {
			status := v1alpha1.ReplicaQuotaStatus{
				Used: v1alpha1.Amounts(offer.Used), Free: v1alpha1.Amounts(offer.Free), Offered: v1alpha1.Amounts(offer.Offered), Reserved: v1alpha1.Amounts(offer.Reserved),
				GivenBack: v1alpha1.Amounts(offer.GivenBack),
			}
			plugin.mutex.Lock()
			before, limited := plugin.statuses[namespace]
			plugin.mutex.Unlock()
			if !limited || before == status {
				continue
			}
			if err := plugin.writeStatus(ctx, namespace, status); err != nil {
				// The next word comes within a moment.
				plugin.say(fmt.Sprintf("quota of namespace '%s': %v", namespace, err))
				continue
			}
			plugin.mutex.Lock()
			plugin.statuses[namespace] = status
			plugin.mutex.Unlock()
		}
	}
}

func (plugin *Plugin) writeStatus(ctx context.Context, namespace string, status v1alpha1.ReplicaQuotaStatus) error {
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return err
	}
	_, err = plugin.quotas.Namespace(namespace).Patch(ctx, "quota", types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}
