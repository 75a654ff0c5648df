package operator_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// newLoss is a stage with a fourth host, d, where the VM runs on a and b, c is the witness, and its Pods stand on their nodes. A silent host is soon lost. The
// operators of these hosts run.
func newLoss(t *testing.T, operators ...string) *stage {
	stage := newStage(t)
	stage.host("d")
	stage.lostAfter = "2s"
	// As long as nobody leads, no silent host is on its way to be lost, however long it takes until the others are heard and the Pods stand.
	for _, name := range []string{"a", "b", "c"} {
		stage.daemons[name].says(stage.part("backup", "", 5, "waiting", false))
	}
	for _, name := range operators {
		stage.operator(name, stage.plane.Address())
	}
	stage.areHeard(operators...)
	stage.bind("shop-0", "a")
	stage.bind("shop-1", "b")
	stage.group("a", 5, true, "b", "c")
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "a" && status.Backup == "b" })
	return stage
}

// group has the daemons say that a VM's group is this: who leads, the second copy and the witness; the leader is connected with all whose operators run. All
// others have nothing.
func (stage *stage) group(leads string, term uint64, protected bool, backup, witness string) {
	stage.Helper()
	for name, daemon := range stage.daemons {
		part := stage.part("none", leads, term, "running", false)
		part.Standby = stage.standby
		switch name {
		case leads:
			part.Role, part.Protected = "primary", protected
		case backup:
			part.Role = "backup"
		case witness:
			part.Role = "witness"
		default:
			daemon.says()
			continue
		}
		for _, peer := range []string{leads, backup, witness} {
			if peer != "" && peer != name {
				_, runs := stage.operators[peer]
				part.Peers = append(part.Peers, control.Peer{Host: peer, Connected: runs, Witness: peer == witness})
			}
		}
		daemon.says(part)
	}
}

func (stage *stage) pod(name string) (*v1.Pod, error) {
	pod := &v1.Pod{}
	return pod, stage.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: name}, pod)
}

// bind does what the scheduler does: nobody else is here to do it.
func (stage *stage) bind(name, node string) {
	stage.Helper()
	stage.asks(name, node)
	stage.goes(name, node)
}

// goes binds a Pod to one of the nodes that it asks for.
func (stage *stage) goes(name, node string) {
	stage.Helper()
	pod, err := stage.pod(name)
	if err != nil {
		stage.Fatal(err)
	}
	binding := &v1.Binding{Target: v1.ObjectReference{Kind: "Node", Name: node}}
	if err := stage.api.SubResource("binding").Create(context.Background(), pod, binding); err != nil {
		stage.Fatal(err)
	}
}

// asks waits until a Pod is there that has no node and asks for these.
func (stage *stage) asks(name string, nodes ...string) {
	stage.Helper()
	vm := stage.get()
	strength := fmt.Sprint(max(vm.Status.Placement.Strength, vm.Spec.Strength))
	testbed.Until(stage.T, fmt.Sprintf("Pod '%s' asks for %v", name, nodes), func() error {
		pod, err := stage.pod(name)
		if err != nil {
			return err
		}
		var wish []string
		if pod.Spec.Affinity != nil {
			for _, term := range pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
				wish = append(wish, term.MatchFields[0].Values...)
			}
		}
		if pod.Spec.NodeName != "" || !slices.Equal(wish, nodes) || pod.Labels["dunlin.dev/strength"] != strength || pod.Labels["dunlin.dev/task"] != "shop" {
			return fmt.Errorf("it is on node '%s' and asks for %v: %v", pod.Spec.NodeName, wish, pod.Labels)
		}
		return nil
	})
}

func (stage *stage) says(kind, words string) {
	stage.Helper()
	testbed.Until(stage.T, kind+": "+words, func() error {
		vm, err := stage.read()
		if err == nil && !says(vm, kind, "False", words) {
			return fmt.Errorf("%+v", vm.Status.Conditions)
		}
		return err
	})
}

// saidAgain is how long a move that was ordered may take before it is ordered again.
const saidAgain = 30 * time.Second

// isTold waits until a daemon was told exactly this, and looks that no other one was told anything. On a slow machine the last order may have been said again: as often as its time has
// passed since this was first asked for.
func (stage *stage) isTold(name string, orders ...string) {
	stage.Helper()
	last := orders[len(orders)-1]
	if _, asked := stage.ordered[last]; !asked {
		stage.ordered[last] = time.Now()
	}
	testbed.Until(stage.T, fmt.Sprintf("host %s is told %v", name, orders), func() error {
		told := stage.daemons[name].told()
		rest := told[min(len(orders), len(told)):]
		if !slices.Equal(told[:len(told)-len(rest)], orders) || len(rest) > int(time.Since(stage.ordered[last])/saidAgain) ||
			slices.ContainsFunc(rest, func(order string) bool { return order != last }) {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
	for other, daemon := range stage.daemons {
		if told := daemon.told(); other != name && len(told) > 0 {
			stage.Errorf("host %s is told %v", other, told)
		}
	}
}

// remembers waits until a host's object has the VM, or not.
func (stage *stage) remembers(name string, is bool) {
	stage.Helper()
	testbed.Until(stage.T, fmt.Sprintf("host %s remembers the VM: %v", name, is), func() error {
		host := &v1alpha1.DunlinHost{}
		if err := stage.api.Get(context.Background(), client.ObjectKey{Name: name}, host); err != nil {
			return err
		}
		object, err := stage.read()
		if err != nil {
			return err
		}
		vm := operator.NameOnHosts(object)
		if slices.ContainsFunc(host.Status.VMs, func(known v1alpha1.HostVM) bool { return known.VM == vm }) != is {
			return fmt.Errorf("it has %+v", host.Status.VMs)
		}
		return nil
	})
}

func isPlaced(status v1alpha1.ProtectedStatus, hosts string) bool {
	return status.Moving == nil && strings.Join(status.Placement.Hosts(), " ") == hosts
}

// The backup's host is lost: its copy's Pod finds another node, and then the host that leads is told, once, and the object says what the group says. The order
// is given only when the other host remembers that it may have a part.
func TestALostHostsCopyGoesToAnotherHost(t *testing.T) {
	stage := newLoss(t, "a", "c", "d")
	stage.asks("shop-1", "d")
	stage.says(operator.Placed, "host 'b' is lost: nothing is heard of it: copy 1 waits for another node with room")
	if told := stage.daemons["a"].told(); len(told) > 0 {
		t.Errorf("nothing has a place, and host a is told %v", told)
	}
	// The other host's operator is not there just now, and has not said that it knows of it.
	stage.operators["d"].Kill()
	stage.bind("shop-1", "d")
	stage.says(operator.Placed, "host 'b' is lost: nothing is heard of it: copy 1 goes to host 'd'")
	stage.daemons["a"].isHeard(t, stage.part("primary", "a", 5, "running", false))
	if told := stage.daemons["a"].told(); len(told) > 0 {
		t.Errorf("host d does not know of it, and host a is told %v", told)
	}
	stage.group("a", 5, false, "b", "c")
	stage.daemons["a"].refuse("the host cannot be reached")
	stage.operator("d", stage.plane.Address())
	stage.says(operator.AsAsked, "its copy does not go from host 'b' to host 'd': the host cannot be reached")
	stage.says(operator.Placed, "host 'b' is lost: nothing is heard of it: copy 1 goes to host 'd'")
	stage.remembers("d", true)
	refused := stage.daemons["a"].refuse("")
	stage.isTold("a", again("backup to d", refused+1)...)
	stage.daemons["a"].isHeard(t, stage.part("primary", "a", 5, "running", false))
	stage.isTold("a", again("backup to d", refused+1)...)

	// The operator dies before it has seen what came of it: nothing has, so that the next one tells the daemon again.
	stage.operators["a"].Kill()
	stage.operator("a", stage.plane.Address())
	stage.isTold("a", again("backup to d", refused+2)...)
	// The group has gone on without host b, and nobody has come yet: the object's hosts are as before.
	stage.group("a", 5, false, "", "c")
	stage.until("it is unprotected", func(status v1alpha1.ProtectedStatus) bool {
		return status.Backup == "" && status.Placement.Members[1] == "b"
	})
	stage.group("a", 5, true, "d", "c")
	stage.until("host d is the backup", func(status v1alpha1.ProtectedStatus) bool { return isPlaced(status, "a d c") && status.Backup == "d" })
	stage.tellsOf("Moved", 1)
	stage.until("its Pods stand there", func(status v1alpha1.ProtectedStatus) bool {
		return says(&v1alpha1.ProtectedVM{Status: status}, operator.Placed, "True", "its hosts are a, d, c")
	})
	pod, err := stage.pod("shop-1")
	if err != nil || pod.Spec.NodeName != "d" {
		t.Errorf("the copy's Pod is on node '%s', %v", pod.Spec.NodeName, err)
	}

	// It takes over, and the first host's copy has no other node until the second one is back, which has no part any more.
	stage.operators["a"].Kill()
	delete(stage.operators, "a")
	stage.group("d", 6, false, "a", "c")
	stage.until("host d serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "d" })
	stage.operator("b", stage.plane.Address())
	stage.remembers("b", false)
	stage.isTold("a", again("backup to d", refused+2)...)
}

func again(order string, times int) []string {
	var orders []string
	for ; times > 0; times-- {
		orders = append(orders, order)
	}
	return orders
}

// A host that is back before its copy has another place keeps it; so does one whose part was on its way, where the group has not gone on without it.
func TestAHostThatIsBackKeepsItsCopy(t *testing.T) {
	stage := newLoss(t, "a", "c", "d")
	stage.asks("shop-1", "d")
	back := func() {
		stage.operator("b", stage.plane.Address())
		stage.group("a", 5, true, "b", "c")
		stage.asks("shop-1", "b")
	}
	back()
	stage.bind("shop-1", "b")
	stage.until("all is as it was", func(status v1alpha1.ProtectedStatus) bool {
		return isPlaced(status, "a b c") && says(&v1alpha1.ProtectedVM{Status: status}, operator.Placed, "True", "its hosts are a, b, c")
	})
	stage.operators["b"].Kill()
	delete(stage.operators, "b")
	stage.silent("b")
	stage.group("a", 5, false, "b", "c")
	stage.daemons["a"].refuse("the old backup is alive and complete")
	stage.asks("shop-1", "d")
	stage.bind("shop-1", "d")
	stage.says(operator.AsAsked, "the old backup is alive and complete")
	back()
	stage.until("it stays", func(status v1alpha1.ProtectedStatus) bool { return isPlaced(status, "a b c") })
	stage.tellsOf("Stays", 1)
	stage.remembers("d", true) // until its next beat, which is far away here
}

// silent says of a host what the elected operator would say after four beats.
func (stage *stage) silent(name string) {
	stage.Helper()
	patch := `{"status":{"conditions":[{"type":"Ready","status":"Unknown","reason":"Silent","message":"test","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`
	host := &v1alpha1.DunlinHost{}
	host.Name = name
	if err := stage.api.Status().Patch(context.Background(), host, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		stage.Fatal(err)
	}
}

// A drained node's copy goes to another node although its host is alive; a node that is only cordoned keeps it. Who serves the VM hands it over first.
func TestADrainedNodesCopyGoesToAnotherHost(t *testing.T) {
	stage := newLoss(t, "a", "b", "c", "d")
	stage.cordon("b", true)
	stage.until("its Pods stand", func(status v1alpha1.ProtectedStatus) bool {
		return says(&v1alpha1.ProtectedVM{Status: status}, operator.Placed, "True", "its hosts are a, b, c")
	})
	stage.evict("shop-1")
	stage.says(operator.Placed, "host 'b' is being drained: copy 1 waits for another node with room")
	// Somebody thinks better of it, and drains it after all.
	stage.asks("shop-1", "d")
	stage.cordon("b", false)
	stage.bind("shop-1", "b")
	stage.cordon("b", true)
	stage.evict("shop-1")
	stage.bind("shop-1", "d")
	stage.isTold("a", "backup to d, unprotected meanwhile")
	stage.group("a", 5, true, "d", "c")
	stage.until("host d is the backup", func(status v1alpha1.ProtectedStatus) bool { return isPlaced(status, "a d c") })

	stage.cordon("b", false)
	stage.cordon("a", true)
	stage.evict("shop-0")
	testbed.Until(t, "host a hands it over", func() error {
		if told := stage.daemons["a"].told(); told[len(told)-1] != "failover" {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
	stage.bind("shop-0", "b")
	stage.group("d", 6, true, "a", "c")
	stage.until("host d serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "d" })
	testbed.Until(t, "host d is told", func() error {
		if told := stage.daemons["d"].told(); !slices.Equal(told, []string{"backup to b, unprotected meanwhile"}) {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
	stage.group("d", 6, true, "b", "c")
	stage.until("host b has the other copy", func(status v1alpha1.ProtectedStatus) bool { return isPlaced(status, "b d c") })
	if told := stage.daemons["a"].told(); !slices.Equal(slices.Compact(told), []string{"backup to d, unprotected meanwhile", "failover"}) {
		t.Errorf("host a is told %v", told)
	}
	for _, vm := range stage.all() {
		if moving := vm.Status.Moving; moving != nil && moving.From == vm.Status.Primary {
			t.Errorf("host %s serves it and is to have no part any more: %+v", moving.From, vm.Status)
		}
	}

	// Its node is deleted, and its daemon serves the VM: it is handed over too.
	node := &v1.Node{}
	node.Name = "d"
	if err := stage.api.Delete(context.Background(), node); err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "host d hands it over", func() error {
		if told := stage.daemons["d"].told(); told[len(told)-1] != "failover" {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
}

// A lost witness's place goes to another host, and a deleted node's part at once.
func TestALostWitnessesPlaceGoesToAnotherHost(t *testing.T) {
	stage := newLoss(t, "a", "b", "d")
	stage.isTold("a", "witness to d")
	stage.group("a", 5, true, "b", "d")
	stage.until("host d is the witness", func(status v1alpha1.ProtectedStatus) bool { return isPlaced(status, "a b d") && status.Witness == "d" })

	stage.operator("c", stage.plane.Address())
	node := &v1.Node{}
	node.Name = "d"
	if err := stage.api.Delete(context.Background(), node); err != nil {
		t.Fatal(err)
	}
	stage.isTold("a", "witness to d", "witness to c, unprotected meanwhile")
}

func (stage *stage) cordon(name string, is bool) {
	stage.Helper()
	node := &v1.Node{}
	node.Name = name
	patch := fmt.Sprintf(`{"spec":{"unschedulable":%v}}`, is)
	if err := stage.api.Patch(context.Background(), node, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		stage.Fatal(err)
	}
}

func (stage *stage) evict(name string) {
	stage.Helper()
	pod, err := stage.pod(name)
	if err == nil {
		err = stage.api.SubResource("eviction").Create(context.Background(), pod, &policy.Eviction{})
	}
	if err != nil {
		stage.Fatal(errors.Join(errors.New("eviction"), err))
	}
}
