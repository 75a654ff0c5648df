package scheduler_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

func bindsOf(task string) func(*http.Request) bool {
	return func(in *http.Request) bool {
		return in.Method == http.MethodPost && strings.Contains(in.URL.Path, "/pods/"+task+"-") && strings.HasSuffix(in.URL.Path, "/binding")
	}
}

// writesOf are claims and binds.
func writesOf(task string) func(*http.Request) bool {
	return func(in *http.Request) bool {
		return in.Method != http.MethodGet && strings.Contains(in.URL.Path, "/pods/"+task+"-")
	}
}

func TestEachSchedulerBindsItsOwnCopies(t *testing.T) {
	cluster := begin(t, 4)
	cluster.submit("shop", 3)
	cluster.submit("data", 2)
	cluster.create(lab.Pod("plain", "100m", "64Mi"))
	cluster.settled()
	agreed := cluster.agreed()
	// On a busy machine one may be silent for so long that another one gets its copies, whoever has bound them.
	_, died := cluster.history()
	for _, task := range []string{"shop", "data"} {
		for number, copy := range agreed.Tasks["default/"+task].Copies {
			path := fmt.Sprintf("/api/v1/namespaces/default/pods/%s-%d/binding", task, number)
			// A request is known as done a moment after its answer.
			cluster.until("who has bound it is known", func() error {
				if by := cluster.bound(path); len(by) != 1 || by[0] != copy.Controller && !died {
					return fmt.Errorf("copy %d of %s is controller %s's, and was bound by %v", number, task, copy.Controller, by)
				}
				return nil
			})
		}
	}
	cluster.until("the ordinary Pod was bound by a controller that led", func() error {
		led, _ := cluster.history()
		if by := cluster.bound("/api/v1/namespaces/default/pods/plain/binding"); len(by) != 1 || !led[by[0]] {
			return fmt.Errorf("%v led, and it was bound by %v", led, by)
		}
		return nil
	})
}

// The leading controller dies when the places are agreed and nothing is bound: the others bind by the same assignment, all copies or none.
func TestTheLeaderDiesBetweenAgreementAndBind(t *testing.T) {
	cluster := begin(t, 5)
	cluster.hold(writesOf("shop"))
	cluster.submit("shop", 3)
	before := cluster.agreedUntil("the places are agreed", func(state *allocation.State) bool { return state.Tasks["default/shop"] != nil })
	leader := before.Office.Leader
	cluster.holdOnly(leader)
	cluster.until("the leader's claim is on its way", func() error {
		if cluster.proxies[leader].Waiting() == 0 {
			return fmt.Errorf("nothing is")
		}
		return nil
	})
	for number := 0; number < 3; number++ {
		node := cluster.pod(fmt.Sprintf("shop-%d", number)).Spec.NodeName
		// Where it was silent for too long another one has claimed its copy's node.
		if _, died := cluster.history(); node != "" && !died {
			t.Errorf("copy %d is bound to node %s, and not all have claimed theirs", number, node)
		}
	}
	cluster.schedulers[leader].Kill()
	cluster.settled()
	for number, copy := range before.Tasks["default/shop"].Copies {
		if node := cluster.pod(fmt.Sprintf("shop-%d", number)).Spec.NodeName; node != copy.Node {
			t.Errorf("copy %d was agreed for node %s, and is on %s", number, copy.Node, node)
		}
	}
	cluster.agreedNow("another one leads", func(state *allocation.State) bool { return state.Office.Leader != leader })
	// What the dead leader had sent comes now.
	cluster.late(leader)
	cluster.settled()
}

// A controller stands still with a bind on its way. Its copy gets another place, nodes die and come back, and the copy's first node gets another copy of
// the task. Then the bind arrives, and the controller goes on.
func TestAControllerThatStandsStillDoesNoHarm(t *testing.T) {
	cluster := begin(t, 4)
	cluster.hold(bindsOf("shop"))
	cluster.submit("shop", 3)
	agreed := cluster.agreedUntil("the places are agreed", func(state *allocation.State) bool { return state.Tasks["default/shop"] != nil })
	slow := agreed.Office.Leader
	cluster.until("a bind is on its way", func() error {
		if cluster.proxies[slow].Waiting() == 0 {
			return fmt.Errorf("none is")
		}
		return nil
	})
	var first string
	var held int
	for number, copy := range agreed.Tasks["default/shop"].Copies {
		if copy.Controller == slow {
			first, held = copy.Node, number
		}
	}
	// Not before: it soon counts as dead then, and its copy is another one's.
	cluster.schedulers[slow].Signal(t, syscall.SIGSTOP)
	cluster.holdOnly(slow)
	cluster.setReady(first, v1.ConditionUnknown)
	cluster.until("the copy is elsewhere", func() error {
		return differs(cluster.pod(fmt.Sprintf("shop-%d", held)), first)
	})
	cluster.settled()
	// One more node dies, and only the first one is left for its copy.
	cluster.setReady(first, v1.ConditionTrue)
	other := (held + 1) % 3
	second := cluster.pod(fmt.Sprintf("shop-%d", other)).Spec.NodeName
	cluster.setReady(second, v1.ConditionUnknown)
	cluster.until("its copy is on the first node", func() error {
		return isOn(cluster.pod(fmt.Sprintf("shop-%d", other)), first)
	})
	cluster.late(slow)
	cluster.schedulers[slow].Signal(t, syscall.SIGCONT)
	cluster.settled()
	cluster.setReady(second, v1.ConditionTrue)
	cluster.submit("data", 2)
	cluster.settled()
}

func TestAllSchedulersBeginAgain(t *testing.T) {
	cluster := begin(t, 4)
	cluster.submit("shop", 3)
	cluster.settled()
	before := cluster.places()
	for _, name := range cluster.hosts.Names {
		cluster.schedulers[name].Kill()
	}
	cluster.submit("data", 3)
	for _, name := range cluster.hosts.Names {
		cluster.scheduler(name)
	}
	cluster.settled()
	now := cluster.places()
	for name, place := range before {
		if now[name] != place {
			t.Errorf("%s was %s and is %s", name, place, now[name])
		}
	}
}

func TestALostNodesCopyGoesElsewhere(t *testing.T) {
	cluster := begin(t, 4)
	cluster.submit("shop", 3)
	cluster.settled()
	before := cluster.places()
	lost := cluster.pod("shop-1").Spec.NodeName
	cluster.setReady(lost, v1.ConditionUnknown)
	cluster.until("the copy is elsewhere", func() error { return differs(cluster.pod("shop-1"), lost) })
	cluster.settled()
	now := cluster.places()
	if now["shop-0"] != before["shop-0"] || now["shop-2"] != before["shop-2"] {
		t.Errorf("the other copies moved: %v, %v", before, now)
	}
}

// Where nothing is known of any node any more, it is the API server that has heard of none: copies that have no other place stay what they are, Pods and all.
func TestCopiesStayWhereAllNodesAreSilent(t *testing.T) {
	cluster := begin(t, 4)
	cluster.submit("shop", 3)
	cluster.settled()
	before, nodes := map[string]types.UID{}, []string{"n0", "n1", "n2", "n3"}
	for number := 0; number < 3; number++ {
		pod := cluster.pod(fmt.Sprintf("shop-%d", number))
		before[pod.Name] = pod.UID
	}
	same := func(when string) {
		t.Helper()
		for name, uid := range before {
			if pod := cluster.pod(name); pod.UID != uid || pod.DeletionTimestamp != nil {
				t.Errorf("%s: %s was %s and is %s, on node '%s'", when, name, uid, pod.UID, pod.Spec.NodeName)
			}
		}
	}
	// The spare node is the first to fall silent, or a copy of another node would rightly go there.
	spare := nodes[slices.IndexFunc(nodes, func(node string) bool {
		for name := range before {
			if cluster.pod(name).Spec.NodeName == node {
				return false
			}
		}
		return true
	})]
	cluster.setReady(spare, v1.ConditionUnknown)
	cluster.agreedNow("the spare node is gone", func(state *allocation.State) bool { return len(state.Nodes) == len(nodes)-1 })
	for _, name := range nodes {
		cluster.setReady(name, v1.ConditionUnknown)
	}
	cluster.agreedNow("no node is there", func(state *allocation.State) bool { return len(state.Nodes) == 0 })
	time.Sleep(3 * time.Second) // that something does not happen nothing tells
	same("all nodes are silent")
	// For the same reason it is the last to be back.
	for _, name := range nodes {
		if name != spare {
			cluster.setReady(name, v1.ConditionTrue)
		}
	}
	cluster.setReady(spare, v1.ConditionTrue)
	cluster.agreedNow("all are there again", func(state *allocation.State) bool {
		task := state.Tasks["default/shop"]
		return len(state.Nodes) == len(nodes) && task != nil && !slices.ContainsFunc(task.Copies, func(copy allocation.Copy) bool { return copy.Phase != allocation.Bound })
	})
	cluster.settled()
	same("they are back")
}

// A Pod that stays for a while after it was deleted, since it has a finalizer and its node is dead, is not deleted again and again.
func TestAPodThatStaysIsDeletedInPeace(t *testing.T) {
	cluster := begin(t, 4)
	for number := 0; number < 3; number++ {
		copy := lab.Copy("shop", number, 3, "1", "512Mi")
		if number == 1 {
			copy.Finalizers = []string{"dunlin.dev/test"}
		}
		cluster.create(copy)
	}
	cluster.settled()
	before := cluster.pod("shop-1")
	cluster.setReady(before.Spec.NodeName, v1.ConditionUnknown)
	cluster.until("it is being deleted", func() error {
		if pod := cluster.pod("shop-1"); pod.DeletionTimestamp == nil {
			return fmt.Errorf("it is on node '%s'", pod.Spec.NodeName)
		}
		return nil
	})
	deletions := func() map[string]int {
		counts := map[string]int{}
		for name, proxy := range cluster.proxies {
			for _, request := range proxy.Done() {
				if request.Method == http.MethodDelete && strings.HasSuffix(request.Path, "/pods/shop-1") {
					counts[name]++
				}
			}
		}
		return counts
	}
	begun := time.Now()
	first := deletions()
	time.Sleep(3 * time.Second) // nothing tells that nothing happens
	for name, count := range deletions() {
		// One at a time, four in a second; beside these one was on its way, and the first two come at once.
		most := int(time.Since(begun)/(250*time.Millisecond)) + 2
		if count -= first[name]; count > most {
			t.Errorf("in %v scheduler %s deleted it %d times", time.Since(begun), name, count)
		}
	}
	// Made anew it has none.
	cluster.mutex.Lock()
	cluster.wanted["shop-1"] = lab.Copy("shop", 1, 3, "1", "512Mi")
	cluster.mutex.Unlock()
	patch := []byte(`{"metadata":{"finalizers":null}}`)
	if _, err := cluster.client.CoreV1().Pods("default").Patch(context.Background(), "shop-1", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	cluster.until("the copy is elsewhere", func() error { return differs(cluster.pod("shop-1"), before.Spec.NodeName) })
	cluster.settled()
}

// A lost copy goes where its Pod asks to go, whatever other nodes have room; and one that asks for its own node alone holds no place elsewhere meanwhile.
func TestALostCopyGoesWhereItsPodAsks(t *testing.T) {
	cluster := begin(t, 5)
	cluster.submit("shop", 2)
	cluster.settled()
	lost, taken := cluster.pod("shop-1").Spec.NodeName, cluster.pod("shop-0").Spec.NodeName
	// By their names the first ones are chosen where all have the same room.
	asks := ""
	for at := 0; at < 5; at++ {
		if name := fmt.Sprintf("n%d", at); name != lost && name != taken {
			asks = name
		}
	}
	cluster.asks("shop-1", asks)
	cluster.setReady(lost, v1.ConditionUnknown)
	cluster.until("the copy is where it asked to be", func() error { return isOn(cluster.pod("shop-1"), asks) })
	cluster.settled()

	cluster.asks("shop-1", asks)
	cluster.setReady(asks, v1.ConditionUnknown)
	cluster.event("shop-1", "a copy is lost, and no other node where it may go has room for it")
	cluster.agreedUntil("it has no place", func(state *allocation.State) bool {
		task := state.Tasks["default/shop"]
		return task != nil && state.Nodes[asks] == nil && task.Copies[1].Phase == allocation.Missing
	})
	cluster.setReady(asks, v1.ConditionTrue)
	cluster.until("the copy is on its node again", func() error { return isOn(cluster.pod("shop-1"), asks) })
	cluster.settled()
}

// asks has the Pod of a copy of two ask for a node, when it is made anew.
func (cluster *cluster) asks(name, node string) {
	pod := lab.Copy("shop", int(name[len(name)-1]-'0'), 2, "1", "512Mi")
	pod.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
		NodeSelectorTerms: []v1.NodeSelectorTerm{{
			MatchFields: []v1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: v1.NodeSelectorOpIn, Values: []string{node}}},
		}},
	}}}
	cluster.mutex.Lock()
	defer cluster.mutex.Unlock()
	cluster.wanted[name] = pod
}

// A task whose copies do not fit now holds nothing, and is placed when there is room.
func TestATaskThatDoesNotFitHoldsNothing(t *testing.T) {
	cluster := beginWithoutSchedulers(t, 3)
	// Before anybody looks, or the task might have its places first.
	cluster.setReady("n2", v1.ConditionFalse)
	cluster.start()
	cluster.submit("shop", 3)
	cluster.submit("data", 2)
	cluster.until("the one that fits is placed", func() error {
		for number := 0; number < 2; number++ {
			if err := isBound(cluster.pod(fmt.Sprintf("data-%d", number))); err != nil {
				return err
			}
		}
		return nil
	})
	for number := 0; number < 3; number++ {
		pod := cluster.pod(fmt.Sprintf("shop-%d", number))
		if pod.Spec.NodeName != "" || pod.Annotations["dunlin.dev/claim"] != "" {
			t.Errorf("copy %d holds something: %s %v", number, pod.Spec.NodeName, pod.Annotations)
		}
	}
	cluster.event("shop-0", "fewer than 3 nodes")
	cluster.setReady("n2", v1.ConditionTrue)
	cluster.settled()
}

// A task is deleted, and made again under its name with another R, whoever has seen that it was gone meanwhile.
func TestATaskIsMadeAgainWithAnotherR(t *testing.T) {
	cluster := begin(t, 4)
	cluster.submit("shop", 2)
	cluster.settled()
	before := 2
	for _, strength := range []int{3, 2, 3} {
		for number := 0; number < before; number++ {
			cluster.end(fmt.Sprintf("shop-%d", number))
		}
		cluster.until("its Pods are gone", func() error {
			for number := 0; number < before; number++ {
				_, err := cluster.client.CoreV1().Pods("default").Get(context.Background(), fmt.Sprintf("shop-%d", number), metav1.GetOptions{})
				if !apierrors.IsNotFound(err) {
					return fmt.Errorf("Pod %d: %v", number, err)
				}
			}
			return nil
		})
		cluster.submit("shop", strength)
		cluster.settled()
		before = strength
	}
}

// What a DunlinHost says of a node is what copies may take of it.
func TestCopiesKeepToWhatAHostGives(t *testing.T) {
	cluster := begin(t, 5)
	cluster.plane.Install(t)
	client, err := dynamic.NewForConfig(cluster.plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	hosts := client.Resource(v1alpha1.Version.WithResource("dunlinhosts"))
	for node, spec := range map[string]map[string]any{"n0": {"copies": false}, "n1": {"memoryMiB": int64(600)}, "n2": {"memoryMiB": int64(500)}} {
		host := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "dunlin.dev/v1alpha1", "kind": "DunlinHost", "metadata": map[string]any{"name": node}, "spec": spec,
		}}
		if _, err := hosts.Create(context.Background(), host, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// It holds for what comes from now on: the look that finds a task reads it, and what the places need of it is agreed with them.
	cluster.submit("shop", 3)
	cluster.settled()
	for number := 0; number < 3; number++ {
		if node := cluster.pod(fmt.Sprintf("shop-%d", number)).Spec.NodeName; node == "n0" || node == "n2" {
			t.Errorf("copy %d needs 512 MiB, and is on node %s", number, node)
		}
	}
}

func TestWrongLabelsAreSaidOnThePod(t *testing.T) {
	cluster := begin(t, 3)
	for name, labels := range map[string]map[string]string{
		"no-task":   {"dunlin.dev/strength": "2", "dunlin.dev/copy": "0"},
		"no-number": {"dunlin.dev/strength": "2", "dunlin.dev/task": "shop"},
		"too-many":  {"dunlin.dev/strength": "200", "dunlin.dev/task": "shop", "dunlin.dev/copy": "0"},
		"no-such":   {"dunlin.dev/strength": "2", "dunlin.dev/task": "shop", "dunlin.dev/copy": "2"},
	} {
		pod := lab.Pod(name, "10m", "10Mi")
		pod.Labels = labels
		cluster.create(pod)
		cluster.until(name, func() error {
			for _, condition := range cluster.pod(name).Status.Conditions {
				if condition.Type == v1.PodScheduled && condition.Status == v1.ConditionFalse && strings.Contains(condition.Message, "label dunlin.dev/") {
					return nil
				}
			}
			return fmt.Errorf("conditions are %v", cluster.pod(name).Status.Conditions)
		})
	}
}

func TestMistakesInTheConfigurationGetOneLine(t *testing.T) {
	cluster := beginWithoutSchedulers(t, 0)
	for args, says := range map[string]string{
		`{}`:                           "plugin Tripod: args.controller, or NODE_NAME in the environment, has to name this controller",
		`{controller: a, sokets: [x]}`: `unknown field`,
		`{controller: a, aliveMilliseconds: 100, deadMilliseconds: 100}`: "deadMilliseconds at least twice that",
	} {
		process := cluster.run("a", args)
		select {
		case <-process.Ended:
		case <-time.After(testbed.Patience):
			t.Fatalf("%s: it runs: %s", args, process.Said())
		}
		if said := process.Said(); !strings.Contains(said, says) {
			t.Errorf("%s: %s", args, said)
		}
	}
}

// A placed task gets another R: its Pods say so one after the other, the first copy's last. What is there stays where it is, and all schedulers agree on the new R, which
// is counted to the namespace's quota.
func TestAPlacedTaskGetsAnotherR(t *testing.T) {
	cluster := begin(t, 4)
	cluster.submit("shop", 2)
	cluster.settled()
	before := cluster.places()
	relabel := func(strength int, pods ...string) {
		t.Helper()
		for _, name := range pods {
			change := []byte(fmt.Sprintf(`{"metadata":{"labels":{%q:"%d"}}}`, v1alpha1.StrengthLabel, strength))
			if _, err := cluster.client.CoreV1().Pods("default").Patch(context.Background(), name, types.MergePatchType, change, metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
			cluster.mutex.Lock()
			cluster.wanted[name].Labels[v1alpha1.StrengthLabel] = fmt.Sprint(strength)
			cluster.mutex.Unlock()
		}
	}
	for range 2 {
		cluster.create(lab.Copy("shop", 2, 3, "1", "512Mi"))
		relabel(3, "shop-1", "shop-0")
		cluster.agreedNow("its R is 3, and its new copy is bound", func(state *allocation.State) bool {
			task := state.Tasks["default/shop"]
			return task != nil && task.Strength == 3 && len(task.Copies) == 3 && task.Copies[2].Phase == allocation.Bound
		})
		cluster.settled()
		relabel(2, "shop-1", "shop-0")
		cluster.end("shop-2")
		cluster.agreedNow("its R is 2", func(state *allocation.State) bool {
			task := state.Tasks["default/shop"]
			return task != nil && task.Strength == 2 && len(task.Copies) == 2
		})
		cluster.settled()
		if now := cluster.places(); !maps.Equal(now, before) {
			t.Errorf("its copies were on %v, and are on %v", before, now)
		}
	}
}
