package scheduler_test

import (
	"context"
	"fmt"
	"maps"
	"testing"

	v1 "k8s.io/api/core/v1"
	scheduling "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"dunlin.dev/k8s/kube/lab"
)

// Pods with the priority of copies keep their nodes, however urgent an ordinary Pod is: the copies would go on using what that one is given. They take nobody's place
// either.
func TestAnUrgentPodDoesNotTakeACopysPlace(t *testing.T) {
	cluster := begin(t, 2)
	never := v1.PreemptNever
	for _, class := range []*scheduling.PriorityClass{
		{ObjectMeta: metav1.ObjectMeta{Name: "dunlin-copy"}, Value: 1_000_000_000, PreemptionPolicy: &never}, {ObjectMeta: metav1.ObjectMeta{Name: "urgent"}, Value: 1000},
	} {
		if _, err := cluster.client.SchedulingV1().PriorityClasses().Create(context.Background(), class, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		// The server's own list of them is a little late.
		cluster.until("class "+class.Name+" is known", func() error {
			pod := lab.Pod("knows", "1m", "1Mi")
			pod.Spec.PriorityClassName = class.Name
			_, err := cluster.client.CoreV1().Pods("default").Create(context.Background(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err
		})
	}
	of := func(class string, pod *v1.Pod) *v1.Pod {
		pod.Spec.PriorityClassName = class
		return pod
	}
	for number := range 2 {
		cluster.create(of("dunlin-copy", lab.Copy("shop", number, 2, "2", "512Mi")))
	}
	// Each scheduler has a cache of its own: what two of them place on one node at the same time may be more than that has, as a kubelet would say. So the copies come first.
	cluster.settled()
	for number, name := range []string{"first", "second"} {
		pod := of("urgent", lab.Pod(name, "1500m", "64Mi"))
		pod.Spec.NodeSelector = map[string]string{v1.LabelHostname: fmt.Sprintf("n%d", number)}
		cluster.create(pod)
	}
	cluster.settled()
	before := cluster.places()
	// Nobody's place is theirs: an urgent one's place is taken by nobody, and a copy's by no urgent one.
	waits := func(pod *v1.Pod) {
		t.Helper()
		cluster.create(pod)
		cluster.until(pod.Name+" finds no node", func() error {
			now := cluster.pod(pod.Name)
			for _, condition := range now.Status.Conditions {
				if condition.Type == v1.PodScheduled && condition.Reason == v1.PodReasonUnschedulable {
					return nil
				}
			}
			return fmt.Errorf("it is on node '%s': %v", now.Spec.NodeName, now.Status.Conditions)
		})
		cluster.mutex.Lock()
		delete(cluster.wanted, pod.Name)
		cluster.mutex.Unlock()
		if now := cluster.places(); !maps.Equal(before, now) || cluster.pod(pod.Name).Status.NominatedNodeName != "" {
			t.Errorf("%s waits, and all others were %v and are %v", pod.Name, before, now)
		}
	}
	waits(of("urgent", lab.Pod("third", "1", "64Mi")))
	waits(of("dunlin-copy", lab.Pod("single", "1", "64Mi")))
}
