package scheduler

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// queue notes which Pods are to be tried again.
type queue struct {
	framework.Handle
	again []string
}

func (queue *queue) Activate(_ klog.Logger, pods map[string]*v1.Pod) {
	for _, pod := range pods {
		queue.again = append(queue.again, pod.Name)
	}
}

// limited is a cluster that has these Pods, in a namespace with a quota. A look tells which of them are tried again.
func limited(t *testing.T, pods ...*v1.Pod) (cluster, func() []string) {
	t.Helper()
	indexer, queue := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{byNamespace: cache.MetaNamespaceIndexFunc}), &queue{}
	for _, pod := range pods {
		if err := indexer.Add(pod); err != nil {
			t.Fatal(err)
		}
	}
	cluster := cluster{&Plugin{handle: queue, pods: indexer, singles: newSingles()}}
	return cluster, func() []string {
		t.Helper()
		queue.again = nil
		if _, err := cluster.countSingles(map[string]v1alpha1.ReplicaQuotaSpec{"shops": {}}); err != nil {
			t.Fatal(err)
		}
		return queue.again
	}
}

func asks(name, memory string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shops", UID: types.UID(name)},
		Spec:       v1.PodSpec{Containers: []v1.Container{{Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceMemory: resource.MustParse(memory)}}}}},
	}
}

// leaves has the leading controller leave so much memory to the namespace; it says nothing at all of less than nothing.
func (cluster cluster) leaves(memoryMiB int64) {
	cluster.singles.Judge(func(map[string]allocation.Resources) map[string]allocation.Room {
		if memoryMiB < 0 {
			return nil
		}
		return map[string]allocation.Room{"shops": {Left: allocation.Resources{MemoryMiB: memoryMiB}, MostStrength: 1}}
	})
}

// Of two Pods that were let in together, the second one finds no room when it has its node. It is tried again when there is.
func TestAPodThatIsRefusedAtItsNodeIsTriedAgain(t *testing.T) {
	first, second := asks("first", "600Mi"), asks("second", "600Mi")
	cluster, look := limited(t, first, second)
	look()
	cluster.leaves(1000)
	for _, pod := range []*v1.Pod{first, second} {
		if err := cluster.singles.mayCome(pod); err != nil {
			t.Fatal(err)
		}
	}
	if err := cluster.singles.take(first); err != nil {
		t.Fatal(err)
	}
	if err := cluster.singles.take(second); err == nil {
		t.Fatal("1200 MiB of 1000")
	}
	if again := look(); len(again) > 0 {
		t.Errorf("there is no room, and tried again are %v", again)
	}
	cluster.singles.giveUp(first)
	if again := look(); len(again) != 1 || again[0] != "second" {
		t.Errorf("there is room, and tried again are %v", again)
	}
}

// Whoever was told that the leading controller has said nothing is told what it says, once, also where there is no room.
func TestAPodIsToldWhatTheLeadingControllerSays(t *testing.T) {
	pod := asks("large", "900Mi")
	cluster, look := limited(t, pod)
	look()
	cluster.leaves(-1)
	before := cluster.singles.mayCome(pod)
	if again := look(); before == nil || len(again) > 0 {
		t.Fatalf("%v, and tried again are %v", before, again)
	}
	cluster.leaves(100)
	if again := look(); len(again) != 1 {
		t.Errorf("the leading controller is heard, and tried again are %v", again)
	}
	if after := cluster.singles.mayCome(pod); after == nil || after.Error() == before.Error() {
		t.Errorf("it is told '%v', and then '%v'", before, after)
	}
	if again := look(); len(again) > 0 {
		t.Errorf("there is nothing new, and tried again are %v", again)
	}
	if err := cluster.pods.Delete(pod); err != nil {
		t.Fatal(err)
	}
	if look(); len(cluster.singles.held) > 0 {
		t.Errorf("it is gone, and held are %v", cluster.singles.held)
	}
}
