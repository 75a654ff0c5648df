package operator_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// The only copy's host is destroyed, and its operator with it. The deleted object says what a person can do, and goes when that is done.
func TestADeletedObjectGoesWhenItsOnlyHostIsGoneForGood(t *testing.T) {
	stage := newStage(t)
	stage.lostAfter = "1s"
	vm := stage.get()
	if err := stage.api.Patch(context.Background(), vm, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"strength":1,"policy":"none"}}`))); err != nil {
		t.Fatal(err)
	}
	before := vm.DeepCopy()
	vm.Status.Placement = &v1alpha1.Placement{Members: []string{"a"}, Strength: 1, Storage: "gannet"}
	if err := stage.api.Status().Patch(context.Background(), vm, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	stage.operator("b", stage.plane.Address())
	stage.delete()
	stage.until("it says what to do", func(status v1alpha1.ProtectedStatus) bool {
		running := meta.FindStatusCondition(status.Conditions, operator.Running)
		return running != nil && strings.Contains(running.Message, "host 'a' cannot be asked to end the VM") && strings.Contains(running.Message, "kubectl delete node,dunlinhost NAME")
	})
	// There is no DunlinHost of it, since its operator was never there.
	if err := stage.api.Delete(context.Background(), lab.Node("a", "", "4", "4Gi")); err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "it is gone", func() error {
		err := stage.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: "shop"}, &v1alpha1.ProtectedVM{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %v", err)
		}
		return nil
	})
}
