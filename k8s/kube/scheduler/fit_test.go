package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
)

// host makes a node's DunlinHost, or another one of it.
func (cluster *cluster) host(name string, ready metav1.ConditionStatus, status v1alpha1.DunlinHostStatus) {
	cluster.t.Helper()
	client, err := dynamic.NewForConfig(cluster.plane.Config())
	if err != nil {
		cluster.t.Fatal(err)
	}
	hosts := client.Resource(v1alpha1.Version.WithResource("dunlinhosts"))
	made := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "dunlin.dev/v1alpha1", "kind": "DunlinHost", "metadata": map[string]any{"name": name}, "spec": map[string]any{},
	}}
	if _, err := hosts.Get(context.Background(), name, metav1.GetOptions{}); err != nil {
		if _, err := hosts.Create(context.Background(), made, metav1.CreateOptions{}); err != nil {
			cluster.t.Fatal(err)
		}
	}
	status.Conditions = []metav1.Condition{{Type: "Ready", Status: ready, Reason: "Test", Message: "said by a test", LastTransitionTime: metav1.Now().Rfc3339Copy()}}
	said, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&v1alpha1.DunlinHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: status})
	if err != nil {
		cluster.t.Fatal(err)
	}
	object, err := hosts.Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		cluster.t.Fatal(err)
	}
	object.Object["status"] = said["status"]
	if _, err := hosts.UpdateStatus(context.Background(), object, metav1.UpdateOptions{}); err != nil {
		cluster.t.Fatal(err)
	}
}

// needy is a Pod that says what its copy needs.
func needy(pod *v1.Pod, needs v1alpha1.Needs) *v1.Pod {
	pod.Annotations = map[string]string{v1alpha1.NeedsAnnotation: needs.String()}
	return pod
}

// on are the nodes of a task's copies, and says whether each is one of these.
func (cluster *cluster) on(task string, strength int, nodes string) {
	cluster.t.Helper()
	for number := range strength {
		if node := cluster.pod(fmt.Sprintf("%s-%d", task, number)).Spec.NodeName; !slices.Contains(strings.Fields(nodes), node) {
			cluster.t.Errorf("copy %d of %s is on node %s, and not on one of %s", number, task, node, nodes)
		}
	}
}

var (
	withKVM    = v1alpha1.DunlinHostStatus{KVM: true}
	withoutKVM = v1alpha1.DunlinHostStatus{}
)

// Copies go to nodes whose host is heard and has what they need, whatever room others have; where there are too few, one line says what each lacks. Tasks that say
// nothing of it are placed as ever.
func TestCopiesGoWhereTheyCanRun(t *testing.T) {
	cluster := beginWithoutSchedulers(t, 5)
	cluster.plane.Install(t)
	cluster.host("n0", "True", withoutKVM)
	cluster.host("n1", "Unknown", withKVM)
	cluster.host("n2", "True", withKVM)
	cluster.host("n3", "True", withKVM)
	cluster.start()
	for number := range 2 {
		cluster.create(needy(lab.Copy("two", number, 2, "1", "512Mi"), v1alpha1.Needs{KVM: v1alpha1.KVMNeeded}))
	}
	cluster.settled()
	cluster.on("two", 2, "n2 n3")
	for number := range 3 {
		cluster.create(needy(lab.Copy("three", number, 3, "1", "512Mi"), v1alpha1.Needs{KVM: v1alpha1.KVMNeeded}))
	}
	cluster.event("three-0", "fewer than 3 nodes (in different zones, where they have some) have room for 1000m CPU, 512 MiB memory, 0 MiB disk; not on n0: it has no KVM; "+
		"not on n1: no daemon of Dunlin's is heard there; not on n4: it has no DunlinHost")
	cluster.submit("plain", 2)
	cluster.until("a task that needs nothing has the nodes with the most room", func() error {
		return errors.Join(isBound(cluster.pod("plain-0")), isBound(cluster.pod("plain-1")))
	})
	cluster.on("plain", 2, "n0 n1 n4")
	cluster.host("n1", "True", withKVM)
	cluster.settled()
	cluster.on("three", 3, "n1 n2 n3")

	// Alike copies go where KVM is as long as there are enough such nodes, and else where there is none.
	for number := range 2 {
		cluster.create(needy(lab.Copy("alike", number, 2, "100m", "64Mi"), v1alpha1.Needs{KVM: v1alpha1.KVMAlike}))
	}
	cluster.settled()
	cluster.on("alike", 2, "n1 n2 n3")
	cluster.host("n1", "True", withoutKVM)
	cluster.host("n2", "False", withKVM)
	for number := range 2 {
		cluster.create(needy(lab.Copy("without", number, 2, "100m", "64Mi"), v1alpha1.Needs{KVM: v1alpha1.KVMAlike}))
	}
	cluster.settled()
	cluster.on("without", 2, "n0 n1")

	// A lost copy does not go where it cannot run: its Pod is made anew, and waits.
	number := 0
	if cluster.pod("two-1").Spec.NodeName == "n2" {
		number = 1
	}
	cluster.setReady("n2", v1.ConditionUnknown)
	cluster.event(fmt.Sprintf("two-%d", number), "a copy is lost, and no other node where it may go has room for it; not on n0, n1: it has no KVM; not on n4: it has no DunlinHost")
	cluster.host("n4", "True", withKVM)
	cluster.until("the lost copy is where it can run", func() error { return isOn(cluster.pod(fmt.Sprintf("two-%d", number)), "n4") })
}

// A host falls silent between the choice of a node and the claim: the copy does not go there.
func TestACopyDoesNotGoToAHostThatHasFallenSilent(t *testing.T) {
	cluster := beginWithoutSchedulers(t, 4)
	cluster.plane.Install(t)
	for _, name := range []string{"n0", "n1", "n2"} {
		cluster.host(name, "True", withoutKVM)
	}
	cluster.start()
	for _, proxy := range cluster.proxies {
		proxy.HoldReads(func(request *http.Request) bool { return strings.HasSuffix(request.URL.Path, "/dunlinhosts/n0") })
	}
	for number := range 2 {
		cluster.create(needy(lab.Copy("shop", number, 2, "1", "512Mi"), v1alpha1.Needs{}))
	}
	cluster.until("somebody asks for the host", func() error {
		for _, proxy := range cluster.proxies {
			if proxy.Waiting() > 0 {
				return nil
			}
		}
		return fmt.Errorf("nobody does")
	})
	cluster.host("n0", "Unknown", withoutKVM)
	for _, proxy := range cluster.proxies {
		proxy.HoldReads(nil)
	}
	cluster.settled()
	cluster.on("shop", 2, "n1 n2")
}

// A copy with R = 1 is kube-scheduler's to place, among the nodes that can run it; the reason is in its condition, and it is looked at again when a host has got what
// it lacked. It takes of what its host gives to copies.
func TestAnUnprotectedCopyGoesWhereItCanRun(t *testing.T) {
	cluster := beginWithoutSchedulers(t, 3)
	cluster.plane.Install(t)
	cluster.host("n0", "True", v1alpha1.DunlinHostStatus{DiskFreeMiB: 100})
	cluster.host("n1", "True", v1alpha1.DunlinHostStatus{DiskFreeMiB: 1000})
	client, err := dynamic.NewForConfig(cluster.plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"n0", "n1"} {
		patch := []byte(`{"spec":{"memoryMiB":700}}`)
		if _, err := client.Resource(v1alpha1.Version.WithResource("dunlinhosts")).Patch(context.Background(), name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	cluster.start()
	data := v1alpha1.Needs{Data: "/images/default/one", DataMiB: 500}
	cluster.create(needy(lab.Pod("one", "100m", "64Mi"), data))
	cluster.until("it is where the disk is free", func() error { return isOn(cluster.pod("one"), "n1") })
	cluster.host("n1", "True", v1alpha1.DunlinHostStatus{DiskFreeMiB: 400})
	data.Data = "/images/default/two"
	cluster.create(needy(lab.Pod("two", "100m", "64Mi"), data))
	cluster.until("its condition says why", func() error {
		for _, condition := range cluster.pod("two").Status.Conditions {
			if strings.Contains(condition.Message, "1 it has no DunlinHost, 2 less than 500 MiB are free where images lie") {
				return nil
			}
		}
		return fmt.Errorf("%+v", cluster.pod("two").Status.Conditions)
	})
	cluster.create(lab.Pod("plain", "100m", "64Mi"))
	cluster.until("a Pod that needs nothing goes anywhere", func() error { return isBound(cluster.pod("plain")) })
	cluster.host("n0", "True", v1alpha1.DunlinHostStatus{DiskFreeMiB: 100, Data: []string{"/images/default/two"}})
	cluster.until("it is where its data are", func() error { return isOn(cluster.pod("two"), "n0") })

	for at, name := range []string{"three", "four", "five"} {
		cluster.create(needy(lab.Pod(name, "100m", "512Mi"), v1alpha1.Needs{}))
		if at < 2 {
			cluster.until("it has its node", func() error { return isBound(cluster.pod(name)) })
		}
	}
	cluster.until("no host gives more", func() error {
		for _, condition := range cluster.pod("five").Status.Conditions {
			if strings.Contains(condition.Message, "2 its DunlinHost has no more memory for copies") {
				return nil
			}
		}
		return fmt.Errorf("%+v", cluster.pod("five").Status.Conditions)
	})
	// A task's copies find no room there either.
	cluster.create(needy(lab.Copy("task", 0, 2, "100m", "512Mi"), v1alpha1.Needs{}))
	cluster.create(needy(lab.Copy("task", 1, 2, "100m", "512Mi"), v1alpha1.Needs{}))
	cluster.event("task-0", "have room for 100m CPU, 512 MiB memory, 0 MiB disk; not on n2: it has no DunlinHost")
	cluster.end("three")
	cluster.until("it has what another one has left", func() error { return isBound(cluster.pod("five")) })
}
