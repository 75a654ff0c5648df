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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// newReplaced is a stage with a standby, c, and a host without a part, e, whose operator runs.
func newReplaced(t *testing.T, operators ...string) *stage {
	stage := newStandby(t, operators...)
	stage.host("e")
	stage.operator("e", stage.plane.Address())
	return stage
}

// dies is the end of a host's operator, and what the elected one says of it then.
func (stage *stage) dies(name string) {
	stage.Helper()
	stage.operators[name].Kill()
	delete(stage.operators, name)
	stage.silent(name)
}

// hasStandby waits until all is as asked with this standby, and looks that the Pods stand on these nodes.
func (stage *stage) hasStandby(standby, copies string) {
	stage.Helper()
	stage.until("host "+standby+" is the standby", func(status v1alpha1.ProtectedStatus) bool {
		vm := &v1alpha1.ProtectedVM{Status: status}
		return status.Moving == nil && status.Standby == standby && status.Placement.Standby == standby && strings.Join(status.Placement.Copies, "") == copies && status.Placement.Strength == 3 &&
			len(status.Gone) == 0 && says(vm, operator.AsAsked, "True", "as its spec says") && says(vm, operator.Placed, "True", "its standby is "+standby)
	})
	for number, node := range strings.Split(copies, "") {
		if pod, err := stage.pod(fmt.Sprintf("shop-%d", number)); err != nil || pod.Spec.NodeName != node {
			stage.Errorf("Pod %d is on node '%s', %v", number, pod.Spec.NodeName, err)
		}
	}
}

// The standby's host is lost: its Pod finds another node, that host remembers the VM, and the daemons are told once. Who is back has nothing of it, until the new standby's
// node is drained.
func TestALostStandbyIsReplaced(t *testing.T) {
	stage := newReplaced(t, "a", "b", "d")
	stage.says(operator.Placed, "host 'c' is lost: nothing is heard of it: its place as standby waits for another node with room")
	stage.asks("shop-2", "e")
	stage.toldNothing()
	// The new one's operator is not there just now, and has not said that it knows of it.
	stage.operators["e"].Kill()
	stage.bind("shop-2", "e")
	stage.says(operator.Placed, "host 'c' is lost: nothing is heard of it: its place as standby goes to host 'e'")
	stage.toldNothing()
	stage.daemons["a"].refuse("host 'b' does not answer")
	stage.operator("e", stage.plane.Address())
	stage.says(operator.AsAsked, "its place as standby does not go from host 'c' to host 'e': host 'b' does not answer")
	stage.remembers("e", true)
	refused := stage.daemons["a"].refuse("")
	stage.isTold("a", again("standby e", refused+1)...)
	stage.standby = "e"
	stage.group("a", 5, true, "b", "d")
	stage.hasStandby("e", "abe")
	stage.tellsOf("Moves", 1)
	stage.tellsOf("Moved", 1)
	// The old one is back, and changes nothing.
	stage.operator("c", stage.plane.Address())
	stage.remembers("c", false)
	stage.daemons["a"].isHeard(t, stage.served("e"))
	stage.group("a", 5, true, "b", "d")
	stage.hasStandby("e", "abe")
	stage.isTold("a", again("standby e", refused+1)...)

	stage.cordon("e", true)
	stage.evict("shop-2")
	stage.bind("shop-2", "c")
	stage.toldLast("standby c")
	stage.remembers("c", true)
	stage.standby = "c"
	stage.group("a", 5, true, "b", "d")
	stage.hasStandby("c", "abc")
	for _, vm := range stage.all() {
		if moving := vm.Status.Moving; moving != nil && moving.Part != operator.PartStandby {
			t.Errorf("%+v", moving)
		}
	}
}

// served is what host a's daemon says that serves the VM, with this standby.
func (stage *stage) served(standby string) control.VM {
	stage.standby = standby
	stage.group("a", 5, true, "b", "d")
	stage.daemons["a"].mutex.Lock()
	defer stage.daemons["a"].mutex.Unlock()
	return stage.daemons["a"].vms[0]
}

// toldNothing looks that no daemon was told anything.
func (stage *stage) toldNothing() {
	stage.Helper()
	for name, daemon := range stage.daemons {
		if told := daemon.told(); len(told) > 0 {
			stage.Errorf("host %s is told %v", name, told)
		}
	}
}

// A standby that is back before the daemons have another one stays it; and where one of the group is silent, its part comes first: the order is taken back, and the host
// that was to be the standby gets the part.
func TestAStandbyIsReplacedLast(t *testing.T) {
	stage := newReplaced(t, "a", "b", "d")
	stage.daemons["a"].refuse("host 'b' does not answer")
	stage.bind("shop-2", "e")
	stage.says(operator.AsAsked, "its place as standby does not go from host 'c' to host 'e'")
	stage.operator("c", stage.plane.Address())
	stage.bind("shop-2", "c")
	stage.hasStandby("c", "abc")
	stage.tellsOf("Stays", 1)

	stage.dies("c")
	stage.bind("shop-2", "e")
	stage.says(operator.AsAsked, "its place as standby does not go from host 'c' to host 'e'")
	stage.dies("b")
	stage.group("a", 5, false, "b", "d")
	stage.asks("shop-1", "e")
	stage.says(operator.Placed, "host 'c' is lost: nothing is heard of it: it stays the standby as long as another host of the VM is away")
	stage.daemons["a"].refuse("")
	stage.bind("shop-1", "e")
	stage.toldLast("backup to e")
	stage.group("a", 5, true, "e", "d")
	stage.until("host e is the backup", func(status v1alpha1.ProtectedStatus) bool {
		return status.Moving == nil && status.Backup == "e" && strings.Join(status.Placement.Copies, "") == "aec" && status.Placement.Standby == "c"
	})
	stage.says(operator.Placed, "its place as standby stays there, since no other host is heard that has no part in the VM")
	// Whichever of the two lost ones comes back is the standby.
	stage.operator("b", stage.plane.Address())
	stage.bind("shop-2", "b")
	stage.toldLast("standby b")
	stage.standby = "b"
	stage.group("a", 5, true, "e", "d")
	stage.hasStandby("b", "aeb")
	stage.noTwoOnOneNode()
}

// noTwoOnOneNode looks that no two parts were ever written on one node, nor two Pods of now.
func (stage *stage) noTwoOnOneNode() {
	stage.Helper()
	for _, vm := range stage.all() {
		if vm.Status.Placement == nil {
			continue
		}
		homes := slices.Clone(vm.Status.Placement.Homes())
		if slices.Sort(homes); len(slices.Compact(homes)) < len(vm.Status.Placement.Homes()) {
			stage.Errorf("%+v", vm.Status.Placement)
		}
	}
	pods, nodes := &v1.PodList{}, map[string]string{}
	if err := stage.api.List(context.Background(), pods, client.InNamespace("default")); err != nil {
		stage.Fatal(err)
	}
	for _, pod := range pods.Items {
		if other := nodes[pod.Spec.NodeName]; pod.Spec.NodeName != "" && other != "" {
			stage.Errorf("Pods %s and %s are on node %s", pod.Name, other, pod.Spec.NodeName)
		}
		nodes[pod.Spec.NodeName] = pod.Name
	}
}

// A VM that has no fourth host has its third one as witness, on whose node the third Pod stands. When another host comes, that Pod goes there, and the daemons have a
// standby; so it is again when a lost witness has taken the fourth.
func TestAWitnessIsRelievedByAStandby(t *testing.T) {
	stage := newStage(t)
	stage.lostAfter = "2s"
	stage.strength(3)
	vm := stage.get()
	before := vm.DeepCopy()
	vm.Status.Placement.Strength = 3
	if err := stage.api.Status().Patch(context.Background(), vm, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	stage.group("a", 5, true, "b", "c")
	for _, name := range []string{"a", "b", "c"} {
		stage.operator(name, stage.plane.Address())
	}
	stage.areHeard("a", "b", "c")
	for number, node := range []string{"a", "b", "c"} {
		stage.bind(fmt.Sprintf("shop-%d", number), node)
	}
	stage.says(operator.AsAsked, "it has no standby yet: that waits for a node with room whose host is heard and has no part in it")
	stage.until("its Pods stand", func(status v1alpha1.ProtectedStatus) bool {
		return says(&v1alpha1.ProtectedVM{Status: status}, operator.Placed, "True", "its hosts are a, b, c")
	})

	// The witness is lost at the moment when another host comes: its place goes there, and its Pod along.
	stage.dies("c")
	stage.host("d")
	stage.operator("d", stage.plane.Address())
	stage.bind("shop-2", "d")
	stage.isTold("a", "witness to d")
	stage.group("a", 5, true, "b", "d")
	stage.until("host d is the witness", func(status v1alpha1.ProtectedStatus) bool {
		return isPlaced(status, "a b d") && status.Standby == "" && says(&v1alpha1.ProtectedVM{Status: status}, operator.Placed, "True", "its hosts are a, b, d")
	})
	// It is back, and has no part.
	stage.operator("c", stage.plane.Address())
	stage.bind("shop-2", "c")
	stage.toldLast("standby c")
	stage.remembers("c", true)
	stage.standby = "c"
	stage.group("a", 5, true, "b", "d")
	stage.hasStandby("c", "abc")
	stage.tellsOf("GetsStandby", 1)
	testbed.Until(t, "events tell that it has a standby", func() error {
		if stage.events("HasStandby") == 0 {
			return errors.New("none does")
		}
		return nil
	})
	stage.noTwoOnOneNode()
}

// Five real daemons, of which two are there only later: the third host is the witness until the fourth one is the standby. When the backup's host is dead for good, the
// fifth one is the standby after it; so the first host's death is survived as well, and the VM is protected on the two that had no part at first.
func TestAStandbyIsReplacedByRealDaemons(t *testing.T) {
	cluster := beginWith(t, "5s", "d", "e")
	for _, name := range cluster.hosts.Names {
		cluster.host(name, metav1.ConditionTrue)
	}
	for _, name := range []string{"d", "e"} {
		cluster.dies(name)
		cluster.host(name, metav1.ConditionUnknown)
	}
	asked := cluster.shop("shop")
	asked.Spec.Strength, asked.Spec.StandbyAfterSeconds = 3, 7
	cluster.create(asked)
	vm := cluster.until("shop", "it is protected", isProtected)
	first, second, third := vm.Status.Primary, vm.Status.Backup, vm.Status.Witness
	cluster.untilSays("shop", operator.AsAsked, metav1.ConditionFalse, "it has no standby yet")
	cluster.stands("shop", 256+512, []string{first, second, third})
	cluster.increments(third, guest, ":1")

	cluster.returns("d")
	cluster.hasStandby("shop", first, second, "d", []string{first, second, "d"})
	cluster.untilSays("shop", operator.AsAsked, metav1.ConditionTrue, "as its spec says")
	cluster.stands("shop", 256+512, []string{first, second, "d"})
	cluster.event("shop", "HasStandby", "host d is its standby")

	cluster.returns("e")
	killed := time.Now()
	cluster.dies(second)
	cluster.hasStandby("shop", first, "d", "e", []string{first, "e", "d"})
	cluster.Logf("%.1f s after the kill", time.Since(killed).Seconds())
	cluster.event("shop", "Moves", "host "+second+" is lost: nothing is heard of it: its place as standby goes to host e")
	cluster.event("shop", "Moved", "host e is the VM's standby, which host "+second+" was")
	cluster.stands("shop", 256+512, []string{first, "e", "d"})
	cluster.increments(third, guest, ":2")

	cluster.dies(first)
	cluster.hasStandby("shop", "d", "e", first, []string{first, "e", "d"})
	cluster.increments(third, guest, ":3")
	// Who was lost first is back, has nothing of it, and is the standby after the other one.
	cluster.returns(second)
	cluster.hasStandby("shop", "d", "e", second, []string{second, "e", "d"})
	cluster.untilSays("shop", operator.Placed, metav1.ConditionTrue, "its standby is "+second)
	cluster.stands("shop", 256+512, []string{second, "e", "d"})
	cluster.hasNoVM(second)
	cluster.increments(third, guest, ":4")
	cluster.end("shop")
	for _, name := range []string{second, third, "d", "e"} {
		cluster.nothingIsLeft(name)
	}
	cluster.returns(first)
	cluster.nothingIsLeft(first)
}

// hasNoVM waits until a host's daemon has no VM.
func (cluster *cluster) hasNoVM(name string) {
	cluster.Helper()
	testbed.Until(cluster.T, "host "+name+" has no VM", func() error {
		if host := cluster.status(name); len(host.VMs) > 0 {
			return fmt.Errorf("it has %+v", host.VMs)
		}
		return nil
	})
}
