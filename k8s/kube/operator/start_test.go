package operator_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// write patches the object's status.
func (stage *stage) write(patch string) {
	stage.Helper()
	if err := stage.api.Status().Patch(stage.Context(), stage.get(), client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		stage.Fatal(err)
	}
}

// lists writes into a host's DunlinHost, which is made if there is none, that it may have something of the VM, or of none.
func (stage *stage) lists(name string, has bool) {
	stage.Helper()
	host := &v1alpha1.DunlinHost{}
	host.Name = name
	if err := stage.api.Create(stage.Context(), host.DeepCopy()); client.IgnoreAlreadyExists(err) != nil {
		stage.Fatal(err)
	}
	vms := `null`
	if has {
		vms = fmt.Sprintf(`[{"vm":%q,"kind":"ProtectedVM","namespace":"default","name":"shop"}]`, operator.NameOnHosts(stage.get()))
	}
	if err := stage.api.Status().Patch(stage.Context(), host, client.RawPatch(types.MergePatchType, []byte(`{"status":{"vms":`+vms+`}}`))); err != nil {
		stage.Fatal(err)
	}
}

// A daemon that refuses to start a VM is asked again after a while, and not because of what was written of its refusal; one event tells of it.
func TestARefusedStartIsNotALoop(t *testing.T) {
	stage := newStage(t)
	stage.write(`{"status":{"started":null}}`)
	const why = "disk: /images/default/shop.img is not there"
	stage.daemons["a"].refusesUp = why
	begun := time.Now()
	stage.operator("a", stage.plane.Address())
	stage.says(operator.Running, why)
	time.Sleep(3 * time.Second) // that something does not happen nothing tells
	// Where somebody else had changed the object meanwhile, the refusal could not be said before it was tried again: five seconds later.
	if told := stage.daemons["a"].told(); len(told) > 1+int(time.Since(begun)/(5*time.Second)) {
		t.Errorf("in %v host a is told %d times to start it", time.Since(begun), len(told))
	}
	testbed.Until(t, "it is asked again", func() error {
		if len(stage.daemons["a"].told()) < 2 {
			return errors.New("it is not")
		}
		return nil
	})
	stage.says(operator.Running, why)
	stage.tellsOf("Refused", 1)
	for _, vm := range stage.all() {
		if running := meta.FindStatusCondition(vm.Status.Conditions, operator.Running); vm.Status.State == "starting" && running.Reason == "Refused" {
			t.Errorf("%+v", vm.Status)
		}
	}
}

// The host that is to start a VM is not there: that is said. None other does it, since nobody knows whether that one has.
func TestAHostThatIsToStartItAndIsSilentIsNamed(t *testing.T) {
	stage := newStage(t)
	stage.write(`{"status":{"started":null}}`)
	stage.operator("b", stage.plane.Address())
	stage.operator("c", stage.plane.Address())
	stage.until("that is said", func(status v1alpha1.ProtectedStatus) bool {
		return says(&v1alpha1.ProtectedVM{Status: status}, operator.Running, "Unknown", "host 'a', which is to start it, is not heard")
	})
	stage.operator("a", stage.plane.Address())
	testbed.Until(t, "host a starts it", func() error {
		if told := stage.daemons["a"].told(); !slices.Contains(told, "up") {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
	for _, name := range []string{"b", "c"} {
		if told := stage.daemons[name].told(); len(told) > 0 {
			t.Errorf("host %s is told %v", name, told)
		}
	}
}

// Somebody brought a state of Kubernetes back in which a VM that runs has no hosts yet: as long as a host has it that is to have no part in it, it gets no hosts.
func TestAVMThatRunsElsewhereIsNotPlacedAgain(t *testing.T) {
	stage := newStage(t)
	stage.write(`{"status":{"started":null,"placement":null}}`)
	stage.host("x")
	stage.lists("x", true)
	for _, name := range []string{"a", "b", "c"} {
		stage.operator(name, stage.plane.Address())
	}
	for number, node := range []string{"a", "b"} {
		name := fmt.Sprintf("shop-%d", number)
		testbed.Until(t, name+" is there", func() error {
			_, err := stage.pod(name)
			return err
		})
		stage.goes(name, node)
	}
	stage.says(operator.Placed, "host 'x' may have it already")
	stage.lists("x", false)
	stage.until("it has its hosts", func(status v1alpha1.ProtectedStatus) bool { return status.Placement != nil })
	for _, vm := range stage.all() {
		if vm.Status.Placement != nil && says(&vm, operator.Placed, "False", "host 'x'") {
			t.Errorf("%+v", vm.Status)
		}
	}
}

// A host that was not there when its VM was ended takes away what it has when all others have forgotten it. An object that is not found, and a group that nobody leads
// for a moment, are no reason to end a VM that they have too.
func TestWhatOthersHaveTooIsLeftAsItIs(t *testing.T) {
	stage := newStage(t)
	stage.beat = "200ms"
	part := stage.part("backup", "", 5, "waiting", false)
	part.Peers = []control.Peer{{Host: "b"}, {Host: "c", Witness: true}}
	for _, name := range []string{"a", "b", "c"} {
		stage.lists(name, true)
	}
	vm := stage.get()
	if err := stage.api.Delete(t.Context(), vm); err != nil {
		t.Fatal(err)
	}
	stage.daemons["a"].says(part)
	stage.operator("a", stage.plane.Address())
	stage.beats("a")
	if told := stage.daemons["a"].told(); len(told) > 0 {
		t.Fatalf("all hosts have it, and host a is told %v", told)
	}
	forgets := func(name string) {
		host := &v1alpha1.DunlinHost{}
		host.Name = name
		if err := stage.api.Status().Patch(t.Context(), host, client.RawPatch(types.MergePatchType, []byte(`{"status":{"vms":null}}`))); err != nil {
			t.Fatal(err)
		}
	}
	forgets("c")
	stage.beats("a")
	if told := stage.daemons["a"].told(); len(told) > 0 {
		t.Fatalf("host b has it too, and host a is told %v", told)
	}
	forgets("b")
	testbed.Until(t, "host a takes it away", func() error {
		if told := stage.daemons["a"].told(); len(told) == 0 || told[0] != "down" {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
}

// beats waits for more than three beats of a host's operator, in each of which it asks its daemon twice.
func (stage *stage) beats(name string) {
	stage.Helper()
	before := stage.daemons[name].times()
	testbed.Until(stage.T, "host "+name+"'s operator has looked some times", func() error {
		if now := stage.daemons[name].times(); now < before+12 {
			return fmt.Errorf("it has asked %d times", now-before)
		}
		return nil
	})
}

// rests waits until nobody has written the object for two seconds: two who write in turns write it all the time.
func (stage *stage) rests() {
	stage.Helper()
	testbed.Until(stage.T, "the object rests", func() error {
		before := len(stage.all())
		time.Sleep(2 * time.Second) // that something does not happen nothing tells
		if after := len(stage.all()); after != before {
			return fmt.Errorf("in two seconds it has %d more versions", after-before)
		}
		return nil
	})
}

// The host that serves a VM speaks and counts as silent: what is said of that stays until it is heard, and the two do not write in turns.
func TestAHostThatSpeaksAndCountsAsSilentIsNoLoop(t *testing.T) {
	stage := newStage(t)
	stage.servedByA()
	for name := range stage.daemons {
		stage.operator(name, stage.plane.Address())
	}
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "a" })
	stage.silent("a")
	stage.until("it is said to be silent", func(status v1alpha1.ProtectedStatus) bool {
		return says(&v1alpha1.ProtectedVM{Status: status}, operator.Running, "Unknown", "is not heard")
	})
	part := stage.part("primary", "a", 5, "alone", false)
	stage.daemons["a"].says(part)
	stage.until("host a speaks", func(status v1alpha1.ProtectedStatus) bool { return status.State == "alone" })
	stage.rests()
	if !says(stage.get(), operator.Running, "Unknown", "is not heard") {
		t.Errorf("%+v", stage.get().Status.Conditions)
	}
}

// The daemon refuses to end a deleted object's VM: that is said, by one of the two who have something to say of it.
func TestARefusedEndIsNotALoop(t *testing.T) {
	stage := newStage(t)
	stage.servedByA()
	stage.daemons["a"].refusesDown = "no majority of its hosts is heard"
	for name := range stage.daemons {
		stage.operator(name, stage.plane.Address())
	}
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "a" })
	stage.delete()
	stage.until("the refusal is said", func(status v1alpha1.ProtectedStatus) bool {
		return says(&v1alpha1.ProtectedVM{Status: status}, operator.Running, "Unknown", "no majority of its hosts")
	})
	stage.rests()
	if !says(stage.get(), operator.Running, "Unknown", "no majority of its hosts") {
		t.Errorf("%+v", stage.get().Status.Conditions)
	}
}
