package scheduler_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log"
)

// quota is the default namespace's.
type quota struct {
	*cluster
	of dynamic.ResourceInterface
}

// beginQuota gives the namespace a quota of memory, divided by 3.
func (cluster *cluster) beginQuota(memoryMiB int64) quota {
	cluster.t.Helper()
	cluster.plane.Install(cluster.t)
	client, err := dynamic.NewForConfig(cluster.plane.Config())
	if err != nil {
		cluster.t.Fatal(err)
	}
	quotas := client.Resource(v1alpha1.Version.WithResource("replicaquotas")).Namespace("default")
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "dunlin.dev/v1alpha1", "kind": "ReplicaQuota", "metadata": map[string]any{"name": "quota"},
		"spec": map[string]any{"mostStrength": int64(3), "memoryMiB": memoryMiB},
	}}
	if _, err := quotas.Create(context.Background(), object, metav1.CreateOptions{}); err != nil {
		cluster.t.Fatal(err)
	}
	return quota{cluster, quotas}
}

// unknown is what a status may say as it likes.
const unknown = -1

// says waits until the status says where the quota's memory is.
func (quota quota) says(used, free, offered, reserved, givenBack int64) {
	quota.t.Helper()
	quota.until("the status says where the quota is", func() error {
		now, err := quota.of.Get(context.Background(), "quota", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for name, want := range map[string]int64{"used": used, "free": free, "offered": offered, "reserved": reserved, "givenBack": givenBack} {
			if amount, _, _ := unstructured.NestedInt64(now.Object, "status", name, "memoryMiB"); amount != want && want != unknown {
				return fmt.Errorf("%s is %d MiB, not %d: %v", name, amount, want, now.Object["status"])
			}
		}
		return nil
	})
}

func (quota quota) becomes(memoryMiB int) {
	quota.t.Helper()
	patch := []byte(fmt.Sprintf(`{"spec": {"memoryMiB": %d}}`, memoryMiB))
	if _, err := quota.of.Patch(context.Background(), "quota", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		quota.t.Fatal(err)
	}
}

// What is free of a namespace's quota is divided by the largest R; its status says where all of it is.
func TestAQuotaIsDividedByR(t *testing.T) {
	cluster := begin(t, 4)
	quota := cluster.beginQuota(3000)
	quota.says(0, 3000, 1000, 2000, 0)
	cluster.submit("shop", 3)
	cluster.settled()
	quota.says(1536, 1464, 488, 976, 0)
	// It would fit into what is free, and not into what is offered.
	cluster.submit("data", 2)
	cluster.event("data-0", "is offered")
	if pod := cluster.pod("data-0"); pod.Spec.NodeName != "" {
		t.Errorf("it is on node %s", pod.Spec.NodeName)
	}
	quota.becomes(6000)
	cluster.settled()
	quota.says(2560, 3440, 1146, 2292, 512)
}

// waits waits until a Pod's status says that the quota holds it up.
func (cluster *cluster) waits(name string) {
	cluster.t.Helper()
	cluster.until(name+" is held up", func() error {
		pod := cluster.pod(name)
		for _, condition := range pod.Status.Conditions {
			if condition.Type == v1.PodScheduled && condition.Status == v1.ConditionFalse && strings.Contains(condition.Message, "namespace 'default' is offered") {
				return nil
			}
		}
		return fmt.Errorf("it is on node '%s': %v", pod.Spec.NodeName, pod.Status.Conditions)
	})
}

// Pods with R = 1 are counted to the quota too, and what was held for their copies is given back (S3).
func TestAQuotaCountsOrdinaryPods(t *testing.T) {
	cluster := begin(t, 4)
	quota := cluster.beginQuota(3000)
	quota.says(0, 3000, 1000, 2000, 0)
	cluster.create(lab.Pod("first", "100m", "600Mi"))
	cluster.settled()
	givenBack := int64(1200)
	if led, _ := cluster.history(); len(led) > 1 {
		// Whoever takes the office need not know at once what the one before has let in: what was held may be given back twice.
		givenBack = unknown
	}
	quota.says(600, 2400, 800, 1600, givenBack)
	// It would fit into what is free, and not into what is offered. In another namespace nobody holds it up.
	cluster.create(lab.Pod("large", "100m", "900Mi"))
	cluster.waits("large")
	elsewhere := lab.Pod("large", "100m", "900Mi")
	elsewhere.Namespace = "kube-system"
	if _, err := cluster.client.CoreV1().Pods("kube-system").Create(context.Background(), elsewhere, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	cluster.until("the one in another namespace is bound", func() error {
		pod, err := cluster.client.CoreV1().Pods("kube-system").Get(context.Background(), "large", metav1.GetOptions{})
		if err != nil {
			return err
		}
		return isBound(pod)
	})
	// What ends is free again, and who waits for it comes by itself.
	cluster.end("first")
	cluster.settled()
	// Nobody need have seen the moment between the two, in which nothing was used: then less was given back.
	quota.says(900, 2100, 700, 1400, unknown)
	// Copies are counted with their task. A Pod that only says that it stands for one of them is counted for itself, under whatever name.
	quota.becomes(4000)
	for number := 0; number < 3; number++ {
		copy := lab.Copy("shop", number, 3, "1", "512Mi")
		copy.Name = fmt.Sprintf("copy-%d", number)
		cluster.create(copy)
	}
	cluster.settled()
	quota.says(2436, 1564, 521, 1042, unknown)
	quota.becomes(2436)
	quota.says(2436, 0, 0, 0, unknown)
	forged := lab.Pod("shop-1", "1", "512Mi")
	forged.Labels = map[string]string{"dunlin.dev/strength": "1", "dunlin.dev/vm": "shop", "dunlin.dev/number": "1"}
	cluster.create(forged)
	cluster.waits("shop-1")
	// What another scheduler has bound counts, whatever its labels say.
	cluster.end("shop-1")
	quota.becomes(4000)
	quota.says(2436, 1564, 521, 1042, unknown)
	wrong := lab.Copy("wrong", 0, 2, "1", "100Mi")
	wrong.Labels["dunlin.dev/strength"], wrong.Spec.NodeName = "7", "n0"
	wrong.Spec.SchedulerName = "another"
	cluster.create(wrong)
	quota.uses(2536)
}

// uses waits until the quota's status says that so much is used.
func (quota quota) uses(memoryMiB int64) {
	quota.t.Helper()
	quota.cluster.until("it uses so much", func() error {
		object, err := quota.of.Get(context.Background(), "quota", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if used, _, err := unstructured.NestedInt64(object.Object, "status", "used", "memoryMiB"); err != nil || used != memoryMiB {
			return fmt.Errorf("%d MiB, %v", used, err)
		}
		return nil
	})
}

// Many come at once, with R = 1 and more: whatever the order in which they are let in and agreed, the namespace never has more than its quota.
func TestAQuotaHoldsWhoeverComesAtOnce(t *testing.T) {
	cluster := begin(t, 4)
	quota := cluster.beginQuota(3000)
	quota.says(0, 3000, 1000, 2000, 0)
	for number := 0; number < 24; number++ {
		cluster.create(lab.Pod(fmt.Sprintf("single-%d", number), "10m", "100Mi"))
		if number%3 == 0 {
			for copy := 0; copy < 3; copy++ {
				cluster.create(lab.Copy(fmt.Sprintf("task-%d", number), copy, 3, "10m", "100Mi"))
			}
		}
	}
	// Nothing ends, so that what is there at last is the most that there ever was.
	has := func() (memory int64, waiting int) {
		for name, wanted := range cluster.wanted {
			if cluster.pod(name).Spec.NodeName == "" {
				waiting++
			} else {
				memory += wanted.Spec.Containers[0].Resources.Requests.Memory().Value() >> 20
			}
		}
		return memory, waiting
	}
	var memory int64
	cluster.until("no more comes", func() error {
		before, _ := has()
		now, err := quota.of.Get(context.Background(), "quota", metav1.GetOptions{})
		if err != nil {
			return err
		}
		used, _, _ := unstructured.NestedInt64(now.Object, "status", "used", "memoryMiB")
		offered, _, _ := unstructured.NestedInt64(now.Object, "status", "offered", "memoryMiB")
		var waiting int
		if memory, waiting = has(); memory != before || used != memory || offered >= 100 || waiting == 0 {
			return fmt.Errorf("%d MiB before, %d MiB now, used are %d MiB, offered %d MiB, %d Pods wait", before, memory, used, offered, waiting)
		}
		return nil
	})
	// Where another one took the office meanwhile, what the one before had let in comes to it (docs/kubernetes.md).
	if led, _ := cluster.history(); memory > 3000 && len(led) == 1 || memory < 2700 {
		t.Errorf("the Pods have %d MiB of a quota of 3000", memory)
	}
}

// A Pod that asks for more than there can be, on a node that is not there, fills its own namespace's quota, and keeps nobody else's task waiting.
func TestAnAbsurdRequestHoldsUpItsOwnNamespaceAlone(t *testing.T) {
	cluster := begin(t, 4)
	quota := cluster.beginQuota(3000)
	quota.says(0, 3000, 1000, 2000, 0)
	absurd := lab.Pod("absurd", "2G", "2Ei")
	absurd.Spec.NodeName, absurd.Spec.SchedulerName = "nowhere", "another"
	cluster.create(absurd)
	quota.uses(allocation.Most)
	// Something that has to be agreed on before any place is.
	node, err := cluster.client.CoreV1().Nodes().Get(context.Background(), "n0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Spec.Unschedulable = true
	if _, err := cluster.client.CoreV1().Nodes().Update(context.Background(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	elsewhere := cluster.client.CoreV1().Pods("kube-system")
	for number := range 2 {
		copy := lab.Copy("shop", number, 2, "1", "512Mi")
		copy.Namespace = "kube-system"
		if _, err := elsewhere.Create(context.Background(), copy, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	cluster.until("a task in another namespace is bound", func() error {
		for number := range 2 {
			pod, err := elsewhere.Get(context.Background(), fmt.Sprintf("shop-%d", number), metav1.GetOptions{})
			if err != nil {
				return err
			}
			if err := isBound(pod); err != nil {
				return err
			}
		}
		return nil
	})
	// What the namespace has is agreed when it changes: when the quota came, and when the Pod did; and once or twice more where another controller takes the office.
	said := 0
	err = cluster.log.Read(context.Background(), lab.LogName, 1, false, func(kept log.Entry) error {
		entry, err := allocation.Decode(kept.Data)
		for _, change := range entry.Changes {
			if change.SetApplication != nil && change.SetApplication.Name == "default" {
				said++
			}
		}
		return err
	})
	if err != nil || said > 8 {
		t.Errorf("%d times is agreed what the namespace has: %v", said, err)
	}
}
