package operator_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// newStandby is a stage with four hosts: the VM runs on a and b, c is its standby, d its witness, and its Pods stand on their nodes. A silent host is soon lost.
// The operators of these hosts run.
func newStandby(t *testing.T, operators ...string) *stage {
	stage := newStage(t)
	stage.host("d")
	stage.lostAfter, stage.standby = "2s", "c"
	if err := stage.api.Patch(context.Background(), stage.get(), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"strength":3}}`))); err != nil {
		t.Fatal(err)
	}
	vm := stage.get()
	before := vm.DeepCopy()
	vm.Status.Placement = &v1alpha1.Placement{
		Members: []string{"a", "b"}, Witness: "d", Standby: "c", Copies: []string{"a", "b", "c"}, Strength: 3, Storage: "gannet",
	}
	if err := stage.api.Status().Patch(context.Background(), vm, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	stage.group("a", 5, true, "b", "d")
	for _, name := range operators {
		stage.operator(name, stage.plane.Address())
	}
	stage.areHeard(operators...)
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool {
		return status.Primary == "a" && status.Backup == "b" && status.Standby == "c" && says(&v1alpha1.ProtectedVM{Status: status}, operator.AsAsked, "True", "as its spec says")
	})
	for number, node := range []string{"a", "b", "c"} {
		stage.bind(fmt.Sprintf("shop-%d", number), node)
	}
	return stage
}

// isOn says whether these are the members, the witness and the standby.
func isOn(placement *v1alpha1.Placement, members, witness, standby string) bool {
	return strings.Join(placement.Members, " ") == members && placement.Witness == witness && placement.Standby == standby &&
		strings.Join(placement.Copies, " ") == "a b c"
}

// The daemons give a lost host's part to the standby: the operator writes what the group says, orders nothing, and no Pod goes anywhere.
func TestAStandbyHasALostHostsPart(t *testing.T) {
	stage := newStandby(t, "a", "c", "d")
	stage.remembers("c", true)
	stage.says(operator.Placed, "host 'b' is lost: nothing is heard of it: copy 1 goes to host 'c', the standby")
	if gone := stage.get().Status.Gone; len(gone) > 0 {
		t.Errorf("the standby has to have nothing, and %v say so", gone)
	}
	stage.standby = "b"
	stage.group("a", 5, false, "c", "d")
	stage.until("host b is the standby", func(status v1alpha1.ProtectedStatus) bool {
		return isOn(status.Placement, "a c", "d", "b") && status.Standby == "b" && status.Backup == ""
	})
	stage.group("a", 5, true, "c", "d")
	stage.until("host c is the backup", func(status v1alpha1.ProtectedStatus) bool {
		return status.Backup == "c" && status.Strength == 2 && len(status.Gone) == 0
	})
	stage.says(operator.Placed, "host 'b' is lost: nothing is heard of it: its place as standby stays there, since no other host is heard that has no part in the VM")
	stage.tellsOf("Moved", 1)
	// It takes over, and the host that was lost is back: it is the standby, and says of nothing that it has none.
	stage.operator("b", stage.plane.Address())
	stage.group("c", 6, true, "a", "d")
	stage.until("all is as asked", func(status v1alpha1.ProtectedStatus) bool {
		return status.Primary == "c" && status.Backup == "a" && isOn(status.Placement, "a c", "d", "b") && len(status.Gone) == 0 &&
			says(&v1alpha1.ProtectedVM{Status: status}, operator.Placed, "True", "its hosts are a, c, d; its standby is b")
	})
	stage.remembers("b", true)
	for number, node := range []string{"a", "b", "c"} {
		if pod, err := stage.pod(fmt.Sprintf("shop-%d", number)); err != nil || pod.Spec.NodeName != node {
			t.Errorf("Pod %d is on node '%s', %v", number, pod.Spec.NodeName, err)
		}
	}
	for name, daemon := range stage.daemons {
		if told := daemon.told(); len(told) > 0 {
			t.Errorf("host %s is told %v", name, told)
		}
	}
	for _, vm := range stage.all() {
		if vm.Status.Moving != nil {
			t.Errorf("%+v", vm.Status.Moving)
		}
	}
}

// A drained node's daemon answers, so that the daemons see nothing: the operator gives its copy to the standby. A deleted object asks the standby too.
func TestADrainedNodesCopyGoesToTheStandby(t *testing.T) {
	stage := newStandby(t, "a", "b", "c", "d")
	stage.cordon("b", true)
	stage.evict("shop-1")
	stage.isTold("a", "backup to c, unprotected meanwhile")
	stage.says(operator.Placed, "host 'b' is being drained: copy 1 goes to host 'c'")
	stage.standby = "b"
	stage.group("a", 5, true, "c", "d")
	stage.until("host b is the standby", func(status v1alpha1.ProtectedStatus) bool {
		return status.Moving == nil && isOn(status.Placement, "a c", "d", "b") && status.Backup == "c" && len(status.Gone) == 0
	})
	stage.says(operator.Placed, "Pod 'shop-1' does not stand on node 'b' for the standby there")
	stage.asks("shop-1", "b")
	stage.cordon("b", false)
	stage.bind("shop-1", "b")
	stage.until("all is as asked", func(status v1alpha1.ProtectedStatus) bool {
		return says(&v1alpha1.ProtectedVM{Status: status}, operator.Placed, "True", "its hosts are a, c, d; its standby is b")
	})

	// It is deleted: who has it ends it, and the standby's operator says that it has nothing.
	vm := stage.get()
	stage.delete()
	stage.until("the standby has nothing", func(status v1alpha1.ProtectedStatus) bool { return slices.Equal(status.Gone, []string{"b"}) })
	// It has got a part after all, and takes its word back.
	stage.standby = "c"
	stage.group("a", 5, false, "b", "d")
	stage.until("the standby has something", func(status v1alpha1.ProtectedStatus) bool { return !slices.Contains(status.Gone, "b") })
	for _, name := range []string{"a", "b", "c", "d"} {
		stage.daemons[name].says()
	}
	testbed.Until(t, "the object is gone", func() error {
		if err := stage.api.Get(context.Background(), client.ObjectKeyFromObject(vm), vm); client.IgnoreNotFound(err) == nil && err != nil {
			return nil
		}
		return fmt.Errorf("%+v", vm.Status)
	})
}

// Four real daemons, and operators that have patience for five seconds.
func TestAStandbyTakesDeadHostsParts(t *testing.T) {
	cluster := beginWith(t, "5s", "d")
	cluster.outlivesHostsByItsStandby()
	cluster.leavesDrainedNodesForItsStandby()
}

// withStandby has a VM protected that has one, and returns its hosts: the copies' and the standby's by the numbers of its Pods.
func (cluster *cluster) withStandby(name string) (copies []string, witness string) {
	cluster.Helper()
	// Where the fourth one is not heard yet, the third one is the witness, and the fourth becomes the standby.
	for _, host := range cluster.hosts.Names {
		cluster.host(host, metav1.ConditionTrue)
	}
	asked := cluster.shop(name)
	asked.Spec.Strength = 3
	cluster.create(asked)
	vm := cluster.until(name, "it is protected", isProtected)
	copies, witness = slices.Clone(vm.Status.Placement.Copies), vm.Status.Witness
	if !slices.Equal(copies, []string{vm.Status.Primary, vm.Status.Backup, vm.Status.Standby}) || witness == "" || slices.Contains(copies, witness) {
		cluster.Fatalf("%+v", vm.Status)
	}
	cluster.untilSays(name, operator.AsAsked, metav1.ConditionTrue, "as its spec says")
	cluster.event(name, "Placed", fmt.Sprintf("its copies have places on %s and %s, and its standby on %s", copies[0], copies[1], copies[2]))
	cluster.stands(name, 256+512, copies)
	cluster.increments(witness, guest, ":1")
	if host := cluster.status(copies[2]); len(host.VMs) > 0 {
		cluster.Errorf("the standby has %+v", host.VMs)
	}
	return copies, witness
}

// hasStandby waits until these are the hosts, and looks that no Pod is on another node than at first.
func (cluster *cluster) hasStandby(name, primary, backup, standby string, copies []string) {
	cluster.Helper()
	vm := cluster.until(name, fmt.Sprintf("it is protected on %s and %s, and %s is the standby", primary, backup, standby), func(vm *v1alpha1.ProtectedVM) bool {
		return isProtected(vm) && vm.Status.Primary == primary && vm.Status.Backup == backup && vm.Status.Standby == standby && vm.Status.Moving == nil
	})
	placement := vm.Status.Placement
	members, now := []string{primary, backup}, slices.Clone(placement.Members)
	slices.Sort(members)
	if slices.Sort(now); !slices.Equal(now, members) || placement.Standby != standby || !slices.Equal(placement.Copies, copies) {
		cluster.Errorf("%+v", placement)
	}
	for number, node := range copies {
		pod := &v1.Pod{}
		err := cluster.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: fmt.Sprintf("%s-%d", name, number)}, pod)
		if client.IgnoreNotFound(err) != nil || pod.Spec.NodeName != "" && pod.Spec.NodeName != node {
			cluster.Errorf("Pod %d is on node '%s' and not on '%s': %v", number, pod.Spec.NodeName, node, err)
		}
	}
}

// hasLetGo waits until a standby's daemon has nothing of the VM, and all Pods stand.
func (cluster *cluster) hasLetGo(name, standby string, copies []string) {
	cluster.Helper()
	cluster.untilSays(name, operator.Placed, metav1.ConditionTrue, "its standby is "+standby)
	testbed.Until(cluster.T, "the standby has let go", func() error {
		if host := cluster.status(standby); len(host.VMs) > 0 {
			return fmt.Errorf("it has %+v", host.VMs)
		}
		return nil
	})
	cluster.stands(name, 256+512, copies)
}

// outlivesHostsByItsStandby: a copy's host dies for good and the standby has its part; then the first host dies, and the second one, which is back, has that.
// No operator orders anything.
func (cluster *cluster) outlivesHostsByItsStandby() {
	copies, witness := cluster.withStandby("shop")
	first, second, third := copies[0], copies[1], copies[2]
	killed := time.Now()
	cluster.dies(second)
	cluster.hasStandby("shop", first, third, second, copies)
	cluster.Logf("%.1f s after the kill", time.Since(killed).Seconds())
	cluster.event("shop", "Moved", "host "+third+" has the part in the VM that host "+second+" had")
	cluster.untilSays("shop", operator.Placed, metav1.ConditionFalse, "its place as standby stays there, since no other host is heard that has no part in the VM")
	cluster.increments(witness, guest, ":2")
	cluster.returns(second)
	cluster.hasLetGo("shop", second, copies)

	cluster.dies(first)
	cluster.hasStandby("shop", third, second, first, copies)
	cluster.increments(witness, guest, ":3")
	list := &v1.EventList{}
	if err := cluster.api.List(context.Background(), list, client.InNamespace("default")); err != nil {
		cluster.Fatal(err)
	}
	for _, event := range list.Items {
		if event.Reason == "Moves" {
			cluster.Errorf("the operator has ordered something: %s", event.Message)
		}
	}

	// It ends while its standby is dead, which takes away by itself what it had.
	cluster.end("shop")
	for _, name := range []string{second, third, witness} {
		cluster.nothingIsLeft(name)
	}
	cluster.returns(first)
	cluster.nothingIsLeft(first)
}

// leavesDrainedNodesForItsStandby: copies of drained nodes go to the standby while their hosts live, the one that serves too.
func (cluster *cluster) leavesDrainedNodesForItsStandby() {
	copies, witness := cluster.withStandby("till")
	first, second, third := copies[0], copies[1], copies[2]
	cluster.drain(second, "till-1")
	cluster.hasStandby("till", first, third, second, copies)
	cluster.event("till", "Moves", "host "+second+" is being drained: its copy goes to host "+third+"; until that one's copy is complete the VM is unprotected")
	cluster.untilSays("till", operator.Placed, metav1.ConditionFalse, "Pod 'till-1' does not stand on node '"+second+"' for the standby there")
	cluster.increments(witness, guest, ":2")
	cluster.cordon(second, false)
	cluster.hasLetGo("till", second, copies)

	cluster.drain(first, "till-0")
	cluster.hasStandby("till", third, second, first, copies)
	cluster.event("till", "HandedOver", "node "+first+" is being drained")
	cluster.increments(witness, guest, ":3")
	cluster.end("till")
	for _, name := range cluster.hosts.Names {
		cluster.nothingIsLeft(name)
	}
}
