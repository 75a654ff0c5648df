package operator_test

import (
	"context"
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

func isProtected(vm *v1alpha1.ProtectedVM) bool {
	return meta.IsStatusConditionTrue(vm.Status.Conditions, operator.Protected)
}

// guest is the address of the VM's redis.
const guest = "10.77.0.10"

// One cluster for all of it, since it takes a while until it is there.
func TestProtectedVMsAreCarriedOutByRealDaemons(t *testing.T) {
	cluster := begin(t)
	cluster.tellsOfHosts()
	cluster.startsNothingThatIsNotAllowed()
	cluster.saysWhatADaemonRefuses()
	cluster.electsAnother()
	cluster.carriesOutWhoeverIsKilled()
	cluster.runsWithoutABackup()
	cluster.outlivesItsHostAndEnds()
}

// tellsOfHosts: each DunlinHost is made and filled, and one whose operator is silent is not ready any more.
func (cluster *cluster) tellsOfHosts() {
	for _, name := range cluster.hosts.Names {
		host := cluster.host(name, metav1.ConditionTrue)
		testbed.Until(cluster.T, "what host "+name+" is like", func() error {
			host = cluster.host(name, metav1.ConditionTrue)
			if status := host.Status; !strings.Contains(status.Version, ".") || status.DiskFreeMiB == 0 || len(status.Links) != 2 || !status.Links[0].Connected {
				return fmt.Errorf("%+v", status)
			}
			return nil
		})
	}
	cluster.operators["b"].Kill()
	cluster.host("b", metav1.ConditionUnknown)
	cluster.operator("b")
	cluster.host("b", metav1.ConditionTrue)
	cluster.hosts.Kill("b")
	cluster.host("b", metav1.ConditionFalse)
	cluster.hosts.Start(cluster.T, "b")
	cluster.host("b", metav1.ConditionTrue)
}

// startsNothingThatIsNotAllowed: a namespace's VMs have its own images, and bridges that a host's administrator named.
func (cluster *cluster) startsNothingThatIsNotAllowed() {
	theirs := cluster.shop("theirs")
	theirs.Spec.VM.Kernel = cluster.images + "/others/vmlinuz"
	bridge := cluster.shop("bridge")
	bridge.Spec.VM.NICs[0].Bridge = "br1"
	for words, vm := range map[string]*v1alpha1.ProtectedVM{"kernels, initrds and disks of namespace 'default' lie in": theirs, "bridge 'br1' may not be used": bridge} {
		cluster.create(vm)
		cluster.untilSays(vm.Name, operator.Running, metav1.ConditionFalse, words)
		cluster.event(vm.Name, "NotAllowed", words)
		cluster.end(vm.Name)
	}
	for _, name := range cluster.hosts.Names {
		cluster.nothingIsLeft(name)
	}
}

// saysWhatADaemonRefuses: in the daemon's words, and the object can be deleted.
func (cluster *cluster) saysWhatADaemonRefuses() {
	vm := cluster.shop("nothing")
	vm.Spec.VM.Kernel = cluster.images + "/default/no-such-kernel"
	vm.Spec.Strength = 3
	cluster.create(vm)
	cluster.untilSays("nothing", operator.Running, metav1.ConditionFalse, "no-such-kernel")
	cluster.event("nothing", "Refused", "no-such-kernel")
	placed := cluster.get("nothing").Status.Placement
	if placed == nil || len(placed.Members) != 2 || placed.Witness == "" || placed.Standby != "" || placed.Strength != 3 {
		cluster.Errorf("strength 3 is placed as %+v", placed)
	}
	cluster.end("nothing")
}

// electsAnother: the elected operator dies, and another one says which hosts are silent. All are on one machine here, so that the lease does not tell which
// one it is: first c is left alone, then a, so that at least one of them was not elected before.
func (cluster *cluster) electsAnother() {
	for _, left := range []string{"c", "a"} {
		var others []string
		for _, name := range cluster.hosts.Names {
			if name != left {
				others = append(others, name)
			}
		}
		for _, name := range others {
			cluster.operators[name].Kill()
		}
		for _, name := range others {
			cluster.host(name, metav1.ConditionUnknown)
			cluster.operator(name)
			cluster.host(name, metav1.ConditionTrue)
		}
		cluster.Logf("%s: %s was elected, or is", time.Now().UTC().Format("15:04:05"), left)
	}
}

// carriesOutWhoeverIsKilled: operators die at any moment of a VM's start and end, and begin again; it is started once, and nothing of it is left.
func (cluster *cluster) carriesOutWhoeverIsKilled() {
	seed := time.Now().UnixNano()
	cluster.Logf("operators are killed with seed %d", seed)
	random := rand.New(rand.NewSource(seed))
	kill := func() {
		for times := random.Intn(4) + 1; times > 0; times-- {
			// A moment that nothing tells of is what is wanted.
			time.Sleep(time.Duration(random.Intn(400)) * time.Millisecond)
			name := cluster.hosts.Names[random.Intn(len(cluster.hosts.Names))]
			cluster.operators[name].Kill()
			cluster.operator(name)
		}
	}
	for round := 0; round < 3; round++ {
		name := fmt.Sprintf("round-%d", round)
		cluster.create(cluster.shop(name))
		kill()
		cluster.until(name, "it is protected whoever was killed", isProtected)
		leads := 0
		for _, host := range cluster.hosts.Names {
			for _, vm := range cluster.status(host).VMs {
				if vm.Role == "primary" {
					leads++
				}
			}
		}
		if leads != 1 {
			cluster.Errorf("%d hosts serve it", leads)
		}
		vm := cluster.get(name)
		if err := cluster.api.Delete(context.Background(), vm); err != nil {
			cluster.Fatal(err)
		}
		kill()
		cluster.isGone(vm)
		for _, host := range cluster.hosts.Names {
			cluster.nothingIsLeft(host)
		}
	}
}

// runsWithoutABackup: strength 1 is one copy on one host, which cannot get a second one while it exists.
func (cluster *cluster) runsWithoutABackup() {
	vm := cluster.shop("single")
	vm.Spec.Strength, vm.Spec.Policy = 1, "none"
	cluster.create(vm)
	vm = cluster.untilSays("single", operator.Running, metav1.ConditionTrue, "serves it")
	cluster.untilSays("single", operator.Protected, metav1.ConditionFalse, "if its host dies, it is lost")
	placed := vm.Status.Placement
	if len(placed.Members) != 1 || placed.Witness != "" || vm.Status.Backup != "" || vm.Status.Strength != 1 {
		cluster.Errorf("%+v", vm.Status)
	}
	cluster.change("single", func(spec *v1alpha1.ProtectedVMSpec) { spec.Strength, spec.Policy = 2, "dunlin" })
	cluster.untilSays("single", operator.AsAsked, metav1.ConditionFalse, "needs a second host in members")
	// Its host is gone: nobody can say that the VM has ended, until it is back.
	on := placed.Members[0]
	cluster.hosts.Kill(on)
	if err := cluster.api.Delete(context.Background(), vm); err != nil {
		cluster.Fatal(err)
	}
	cluster.untilSays("single", operator.Running, metav1.ConditionUnknown, "cannot be asked to end the VM")
	cluster.hosts.Start(cluster.T, on)
	cluster.isGone(vm)
	cluster.nothingIsLeft(on)
}

// outlivesItsHostAndEnds: a VM from its manifest to its end, through a change of its policy, a drained node, and a dead host.
func (cluster *cluster) outlivesItsHostAndEnds() {
	cluster.create(cluster.shop("shop"))
	vm := cluster.until("shop", "it is protected", isProtected)
	members := vm.Status.Placement.Members
	if vm.Status.Primary != members[0] || vm.Status.Backup != members[1] || vm.Status.Witness == "" || vm.Status.Strength != 2 || vm.Status.LastFailOver != nil {
		cluster.Errorf("%+v", vm.Status)
	}
	witness := vm.Status.Witness
	cluster.event("shop", "Placed", members[0])
	cluster.event("shop", "Started", "on host "+members[0])
	cluster.event("shop", "Protected", "complete second copy")
	cluster.stands("shop", 256+512, members)
	cluster.increments(witness, guest, ":1")
	cluster.measures(vm)

	cluster.change("shop", func(spec *v1alpha1.ProtectedVMSpec) { spec.Policy = "remus" })
	cluster.event("shop", "PolicyChanged", "was dunlin and is remus now")
	cluster.until("shop", "it is protected by the other policy", func(vm *v1alpha1.ProtectedVM) bool {
		return isProtected(vm) && vm.Status.ObservedGeneration == vm.Generation && meta.IsStatusConditionTrue(vm.Status.Conditions, operator.AsAsked)
	})
	cluster.change("shop", func(spec *v1alpha1.ProtectedVMSpec) { spec.Strength, spec.Storage = 3, "sync" })
	cluster.untilSays("shop", operator.AsAsked, metav1.ConditionFalse, "it has no standby yet: that waits for a node with room whose host is heard and has no part in it")
	cluster.untilSays("shop", operator.AsAsked, metav1.ConditionFalse, "storage is gannet until the VM is made anew")
	cluster.change("shop", func(spec *v1alpha1.ProtectedVMSpec) { spec.Strength, spec.Policy, spec.Storage = 1, "none", "gannet" })
	cluster.untilSays("shop", operator.Protected, metav1.ConditionFalse, "if its host dies, it is lost")
	cluster.change("shop", func(spec *v1alpha1.ProtectedVMSpec) { spec.Strength, spec.Policy = 2, "dunlin" })
	cluster.until("shop", "it is protected again", isProtected)

	cluster.drain(members[0], "shop-0")
	vm = cluster.until("shop", "it was handed over", func(vm *v1alpha1.ProtectedVM) bool {
		return vm.Status.Primary == members[1] && vm.Status.LastFailOver != nil
	})
	cluster.event("shop", "HandedOver", "node "+members[0]+" is being drained")
	cluster.untilSays("shop", operator.Placed, metav1.ConditionFalse, "does not stand on node '"+members[0]+"'")
	cluster.cordon(members[0], false)
	cluster.untilSays("shop", operator.Placed, metav1.ConditionTrue, "its hosts are")
	cluster.stands("shop", 256+512, members)
	vm = cluster.until("shop", "the drained node's copy is complete", isProtected)
	cluster.increments(witness, guest, ":2")

	dies, survives := vm.Status.Primary, vm.Status.Backup
	handedOver := vm.Status.LastFailOver
	killed := time.Now()
	cluster.hosts.Kill(dies)
	cluster.operators[dies].Kill()
	vm = cluster.until("shop", "the other host serves it", func(vm *v1alpha1.ProtectedVM) bool { return vm.Status.Primary == survives })
	cluster.Logf("the object says so %d ms after the kill", time.Since(killed).Milliseconds())
	if vm.Status.LastFailOver == nil || vm.Status.LastFailOver.Before(handedOver) || isProtected(vm) || vm.Status.Backup != "" {
		cluster.Errorf("%+v", vm.Status)
	}
	cluster.increments(witness, guest, ":3")
	cluster.event("shop", "FailedOver", "host "+survives+" serves the VM since")
	cluster.event("shop", "TookOver", "on host "+survives)
	cluster.untilSays("shop", operator.Running, metav1.ConditionTrue, "host '"+survives+"' serves it")

	cluster.end("shop")
	cluster.nothingIsLeft(survives)
	cluster.nothingIsLeft(witness)
	// The dead host comes back with its part of a VM that is no more.
	cluster.hosts.Start(cluster.T, dies)
	if host := cluster.status(dies); len(host.VMs) != 1 {
		cluster.Errorf("the dead host does not come back with its part: %+v", host)
	}
	cluster.operator(dies)
	cluster.nothingIsLeft(dies)
}

// stands waits until the Pods that stand for copies are on their hosts, and hold this memory.
func (cluster *cluster) stands(name string, memoryMiB int64, members []string) {
	cluster.Helper()
	testbed.Until(cluster.T, "Pods stand for the copies", func() error {
		for number, member := range members {
			pod := &v1.Pod{}
			if err := cluster.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: fmt.Sprintf("%s-%d", name, number)}, pod); err != nil {
				return err
			}
			memory := pod.Spec.Containers[0].Resources.Requests.Memory().Value() >> 20
			if pod.Spec.NodeName != member || memory != memoryMiB {
				return fmt.Errorf("Pod '%s' holds %d MiB on node '%s'", pod.Name, memory, pod.Spec.NodeName)
			}
		}
		return nil
	})
}

// measures waits until Prometheus would be told.
func (cluster *cluster) measures(vm *v1alpha1.ProtectedVM) {
	cluster.Helper()
	lines := []string{"controller_runtime_reconcile_total"}
	if vm.Status.Primary == "a" {
		lines = append(lines, `dunlin_operator_vm_protected{name="shop",namespace="default"} 1`)
	}
	testbed.Until(cluster.T, "metrics", func() error {
		answer, err := http.Get("http://" + cluster.metrics + "/metrics")
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		for _, line := range lines {
			if err == nil && !strings.Contains(string(text), line) {
				err = fmt.Errorf("no line %s", line)
			}
		}
		return err
	})
}

func (cluster *cluster) cordon(name string, is bool) {
	cluster.Helper()
	node := &v1.Node{}
	if err := cluster.api.Get(context.Background(), client.ObjectKey{Name: name}, node); err != nil {
		cluster.Fatal(err)
	}
	before := node.DeepCopy()
	node.Spec.Unschedulable = is
	if err := cluster.api.Patch(context.Background(), node, client.MergeFrom(before)); err != nil {
		cluster.Fatal(err)
	}
}

// drain is what 'kubectl drain' does with a node that has this Pod.
func (cluster *cluster) drain(node, pod string) {
	cluster.Helper()
	cluster.cordon(node, true)
	of := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod}}
	if err := cluster.api.SubResource("eviction").Create(context.Background(), of, &policy.Eviction{}); err != nil {
		cluster.Fatal(err)
	}
}
