package operator_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// Four real daemons, so that there is a node beside the three that a VM has.
func TestACopyIsMadeAnewOnAnotherNode(t *testing.T) {
	cluster := beginWith(t, "5s", "d")
	cluster.outlivesHostAfterHost()
	cluster.leavesDrainedNodes()
}

// dies is SIGKILL to all that a host has of Dunlin's, and what Kubernetes says of its node when nothing is heard of it.
func (cluster *cluster) dies(name string) {
	cluster.Helper()
	cluster.hosts.Kill(name)
	cluster.operators[name].Kill()
	cluster.setReady(name, v1.ConditionUnknown)
}

// returns is the same machine, switched on again.
func (cluster *cluster) returns(name string) {
	cluster.Helper()
	cluster.hosts.Start(cluster.T, name)
	cluster.operator(name)
	cluster.setReady(name, v1.ConditionTrue)
}

func (cluster *cluster) setReady(name string, ready v1.ConditionStatus) {
	cluster.Helper()
	node := &v1.Node{}
	if err := cluster.api.Get(context.Background(), client.ObjectKey{Name: name}, node); err != nil {
		cluster.Fatal(err)
	}
	before := node.DeepCopy()
	node.Status.Conditions[0].Status = ready
	if err := cluster.api.Status().Patch(context.Background(), node, client.MergeFrom(before)); err != nil {
		cluster.Fatal(err)
	}
}

// fourth is the host that has no part.
func (cluster *cluster) fourth(vm *v1alpha1.ProtectedVM) string {
	for _, name := range cluster.hosts.Names {
		if !slices.Contains(vm.Status.Placement.Hosts(), name) {
			return name
		}
	}
	cluster.Fatalf("all hosts have a part: %+v", vm.Status.Placement)
	return ""
}

// hasCopies waits until the VM is protected by exactly these two copies, and their Pods stand there.
func (cluster *cluster) hasCopies(name, primary, backup string) *v1alpha1.ProtectedVM {
	cluster.Helper()
	vm := cluster.until(name, fmt.Sprintf("it is protected on %s and %s", primary, backup), func(vm *v1alpha1.ProtectedVM) bool {
		return isProtected(vm) && vm.Status.Primary == primary && vm.Status.Backup == backup && vm.Status.Moving == nil &&
			says(vm, operator.Placed, metav1.ConditionTrue, "its hosts are")
	})
	cluster.stands(name, 256+512, vm.Status.Placement.Members)
	return vm
}

// outlivesHostAfterHost: the backup's host dies for good, then the primary's; each time the VM is protected again on a host that had no part, and nothing is
// lost that was acknowledged. Who comes back has nothing of it.
func (cluster *cluster) outlivesHostAfterHost() {
	cluster.create(cluster.shop("shop"))
	vm := cluster.until("shop", "it is protected", isProtected)
	first, second, witness, fourth := vm.Status.Primary, vm.Status.Backup, vm.Status.Witness, cluster.fourth(vm)
	cluster.increments(witness, guest, ":1")

	cluster.dies(second)
	vm = cluster.hasCopies("shop", first, fourth)
	if vm.Status.Witness != witness || vm.Status.LastFailOver != nil {
		cluster.Errorf("%+v", vm.Status)
	}
	cluster.event("shop", "Moves", "host "+second+" is lost: nothing is heard of it: its copy goes to host "+fourth)
	cluster.event("shop", "Moved", "host "+fourth+" has the part in the VM that host "+second+" had")
	cluster.increments(witness, guest, ":2")
	cluster.returns(second)
	cluster.nothingIsLeft(second)

	cluster.dies(first)
	cluster.until("shop", "the fourth host serves it", func(vm *v1alpha1.ProtectedVM) bool { return vm.Status.Primary == fourth })
	cluster.increments(witness, guest, ":3")
	// The only host that has no part is the one that was lost before.
	cluster.hasCopies("shop", fourth, second)
	cluster.increments(witness, guest, ":4")
	cluster.returns(first)
	cluster.nothingIsLeft(first)

	// The witness's host dies too, and the VM outlives one more.
	cluster.dies(witness)
	cluster.until("shop", "another host is the witness", func(vm *v1alpha1.ProtectedVM) bool {
		return vm.Status.Witness == first && vm.Status.Moving == nil && isProtected(vm)
	})
	cluster.dies(fourth)
	cluster.until("shop", "the other copy serves it", func(vm *v1alpha1.ProtectedVM) bool { return vm.Status.Primary == second })
	cluster.increments(first, guest, ":5")
	cluster.untilSays("shop", operator.Placed, metav1.ConditionFalse, "host '"+fourth+"' is lost: nothing is heard of it: copy")
	cluster.untilSays("shop", operator.Placed, metav1.ConditionFalse, "since no other host is heard that has no part in the VM")
	cluster.returns(witness)
	cluster.hasCopies("shop", second, witness)
	cluster.increments(first, guest, ":6")
	cluster.returns(fourth)
	cluster.nothingIsLeft(fourth)

	cluster.end("shop")
	for _, name := range cluster.hosts.Names {
		cluster.nothingIsLeft(name)
	}
}

// leavesDrainedNodes: the copies of drained nodes go to others while their hosts live, and nothing is left there.
func (cluster *cluster) leavesDrainedNodes() {
	cluster.create(cluster.shop("till"))
	vm := cluster.until("till", "it is protected", isProtected)
	first, second, witness, fourth := vm.Status.Primary, vm.Status.Backup, vm.Status.Witness, cluster.fourth(vm)
	cluster.increments(witness, guest, ":1")
	cluster.drain(second, "till-1")
	cluster.hasCopies("till", first, fourth)
	cluster.event("till", "Moves", "host "+second+" is being drained: its copy goes to host "+fourth+"; until that one's copy is complete the VM is unprotected")
	cluster.increments(witness, guest, ":2")
	cluster.nothingIsLeft(second)
	cluster.cordon(second, false)

	cluster.drain(first, "till-0")
	cluster.hasCopies("till", fourth, second)
	cluster.event("till", "HandedOver", "node "+first+" is being drained")
	cluster.increments(witness, guest, ":3")
	cluster.nothingIsLeft(first)
	cluster.end("till")
	testbed.Until(cluster.T, "no Pod is left", func() error {
		pods := &v1.PodList{}
		if err := cluster.api.List(context.Background(), pods, client.InNamespace("default")); err != nil || len(pods.Items) > 0 {
			return fmt.Errorf("%d Pods, %v", len(pods.Items), err)
		}
		return nil
	})
	for _, name := range cluster.hosts.Names {
		cluster.nothingIsLeft(name)
	}
}
