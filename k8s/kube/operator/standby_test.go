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
	stage.says(operator.Placed, "host 'b' is lost: nothing is heard of it: it stays the standby, which cannot be another host while the VM runs")
	if count := stage.events("Moved"); count != 1 {
		t.Errorf("a part went to another host once, and %d events tell of it", count)
	}
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
	if err := stage.api.Delete(context.Background(), vm); err != nil {
		t.Fatal(err)
	}
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

// Four real daemons: a copy's host dies for good and the standby has its part, then the first host dies and the second one, which came back, has that. The
// operators would have had patience for five seconds.
func TestAStandbyTakesDeadHostsParts(t *testing.T) {
	cluster := beginWith(t, "5s", "d")
	asked := cluster.shop("shop")
	asked.Spec.Strength = 3
	cluster.create(asked)
	vm := cluster.until("shop", "it is protected", isProtected)
	copies := slices.Clone(vm.Status.Placement.Copies)
	first, second, third, witness := vm.Status.Primary, vm.Status.Backup, vm.Status.Standby, vm.Status.Witness
	if !slices.Equal(copies, []string{first, second, third}) || slices.Contains(copies, witness) || witness == "" || third == "" {
		t.Fatalf("%+v", vm.Status.Placement)
	}
	cluster.untilSays("shop", operator.AsAsked, metav1.ConditionTrue, "as its spec says")
	cluster.event("shop", "Placed", "its copies have places on "+first+" and "+second+", and its standby on "+third)
	cluster.stands("shop", 256+512, copies)
	cluster.increments(witness, guest, ":1")
	if host := cluster.status(third); len(host.VMs) > 0 {
		t.Errorf("the standby has %+v", host.VMs)
	}

	killed := time.Now()
	cluster.dies(second)
	vm = cluster.until("shop", "it is protected on the standby", func(vm *v1alpha1.ProtectedVM) bool {
		return isProtected(vm) && vm.Status.Primary == first && vm.Status.Backup == third && vm.Status.Standby == second
	})
	t.Logf("%.1f s after the kill", time.Since(killed).Seconds())
	cluster.isPlacedOn(vm, []string{first, third}, second, copies)
	cluster.event("shop", "Moved", "host "+third+" has the part in the VM that host "+second+" had")
	cluster.untilSays("shop", operator.Placed, metav1.ConditionFalse, "it stays the standby, which cannot be another host while the VM runs")
	cluster.increments(witness, guest, ":2")
	cluster.returns(second)
	cluster.untilSays("shop", operator.Placed, metav1.ConditionTrue, "its standby is "+second)
	testbed.Until(t, "the host that is back has let go", func() error {
		if host := cluster.status(second); len(host.VMs) > 0 {
			return fmt.Errorf("it has %+v", host.VMs)
		}
		return nil
	})
	cluster.stands("shop", 256+512, copies)

	cluster.dies(first)
	vm = cluster.until("shop", "it is protected on the two hosts that are left", func(vm *v1alpha1.ProtectedVM) bool {
		return isProtected(vm) && vm.Status.Primary == third && vm.Status.Backup == second && vm.Status.Standby == first
	})
	cluster.isPlacedOn(vm, []string{second, third}, first, copies)
	cluster.increments(witness, guest, ":3")

	// It ends while its standby is dead, which takes away by itself what it had.
	cluster.end("shop")
	for _, name := range []string{second, third, witness} {
		cluster.nothingIsLeft(name)
	}
	cluster.returns(first)
	cluster.nothingIsLeft(first)
}

// isPlacedOn looks that these have the copies, and that nothing was ordered and no Pod is on another node than at first.
func (cluster *cluster) isPlacedOn(vm *v1alpha1.ProtectedVM, members []string, standby string, copies []string) {
	cluster.Helper()
	placement := vm.Status.Placement
	now := slices.Sorted(slices.Values(placement.Members))
	if slices.Sort(members); !slices.Equal(now, members) || placement.Standby != standby || !slices.Equal(placement.Copies, copies) || vm.Status.Moving != nil {
		cluster.Errorf("%+v, moving %+v", placement, vm.Status.Moving)
	}
	for number, node := range copies {
		pod := &v1.Pod{}
		err := cluster.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: fmt.Sprintf("shop-%d", number)}, pod)
		if client.IgnoreNotFound(err) != nil || pod.Spec.NodeName != "" && pod.Spec.NodeName != node {
			cluster.Errorf("Pod %d is on node '%s' and not on '%s': %v", number, pod.Spec.NodeName, node, err)
		}
	}
	list := &v1.EventList{}
	if err := cluster.api.List(context.Background(), list, client.InNamespace("default")); err != nil {
		cluster.Fatal(err)
	}
	for _, event := range list.Items {
		if event.Reason == "Moves" {
			cluster.Errorf("the operator has ordered something: %s", event.Message)
		}
	}
}
