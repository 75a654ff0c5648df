package lab

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Pod is one for dunlin-scheduler. Nothing runs it.
func Pod(name, cpu, memory string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{}},
		Spec: v1.PodSpec{
			SchedulerName: "dunlin-scheduler",
			Containers: []v1.Container{{Name: "one", Image: "none", Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
				v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse(memory),
			}}}},
		},
	}
}

// Copy is a task's.
func Copy(task string, number, strength int, cpu, memory string) *v1.Pod {
	pod := Pod(fmt.Sprintf("%s-%d", task, number), cpu, memory)
	pod.Labels = map[string]string{
		"dunlin.dev/task": task, "dunlin.dev/copy": fmt.Sprint(number), "dunlin.dev/strength": fmt.Sprint(strength),
	}
	return pod
}

// Node is one that is ready. No kubelet is there.
func Node(name, zone, cpu, memory string) *v1.Node {
	there := v1.ResourceList{
		v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse(memory), v1.ResourcePods: resource.MustParse("110"),
	}
	node := &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}},
		Status: v1.NodeStatus{
			Capacity: there, Allocatable: there,
			Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "Test", Message: "it is ready"}},
		},
	}
	if zone != "" {
		node.Labels[v1.LabelTopologyZone] = zone
	}
	return node
}
