package scheduler

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// While a Pod takes its time to end the copies of the whole cluster are read now and then, whatever else changes meanwhile; and at once when it is gone.
func TestAPodThatTakesItsTimeIsNotLookedForAllTheTime(t *testing.T) {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "shop-0", Namespace: "shops", UID: "1", Annotations: map[string]string{ClaimAnnotation: "7 n0"},
			Labels: map[string]string{v1alpha1.StrengthLabel: "2", v1alpha1.TaskLabel: "shop", v1alpha1.CopyLabel: "0"},
		},
		Spec: v1.PodSpec{NodeName: "n0"},
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n0"}, Status: v1.NodeStatus{Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}}}
	client := fake.NewClientset(pod)
	var deletions, lists atomic.Int64
	ending := make(chan bool, 1)
	client.PrependReactor("delete", "pods", func(kubetesting.Action) (bool, runtime.Object, error) {
		if deletions.Add(1) == 1 {
			ending <- true
		}
		return true, nil, nil
	})
	client.PrependReactor("list", "pods", func(kubetesting.Action) (bool, runtime.Object, error) {
		lists.Add(1)
		return false, nil, nil
	})
	plugin := &Plugin{
		claims: claims{client}, pods: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}), nodes: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}),
		news: make(chan struct{}),
	}
	if err := plugin.nodes.Add(node); err != nil {
		t.Fatal(err)
	}
	if err := plugin.pods.Add(pod); err != nil {
		t.Fatal(err)
	}
	ended := make(chan allocation.Outcome, 1)
	begun := time.Now()
	go func() {
		outcome, err := cluster{plugin}.Unbind(context.Background(), allocation.Binding{Task: "shops/shop", Copy: 0, Node: "n0", Ticket: 7})
		if err != nil {
			t.Error(err)
		}
		ended <- outcome
	}()
	<-ending
	for time.Since(begun) < betweenReadings/2 {
		plugin.change()
		time.Sleep(time.Millisecond)
	}
	// One more for each time that a busy machine has made longer of that.
	if count, most := lists.Load(), 1+int64(time.Since(begun)/betweenReadings); count > most {
		t.Errorf("the copies were read %d times in %v", count, time.Since(begun))
	}
	if err := client.Tracker().Delete(v1.SchemeGroupVersion.WithResource("pods"), "shops", "shop-0"); err != nil {
		t.Fatal(err)
	}
	if err := plugin.pods.Delete(pod); err != nil {
		t.Fatal(err)
	}
	plugin.change()
	if outcome := <-ended; outcome != allocation.Done {
		t.Errorf("it is %v", outcome)
	}
}
