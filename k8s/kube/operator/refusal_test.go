package operator_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

const noImage = "host 'e': disk: /images/default/shop.img is not there"

// asked is how often host a's daemon was told to give a part to somebody.
func (stage *stage) asked(order string) (times int) {
	for _, told := range stage.daemons["a"].told() {
		if strings.HasPrefix(told, order) {
			times++
		}
	}
	return times
}

// A standby is lost, and the host that is to be the next one has not the VM's images: it is asked three times, and then another one is.
func TestAHostThatRefusesIsFollowedByAnother(t *testing.T) {
	stage := newReplaced(t, "a", "b", "d")
	stage.daemons["a"].hostLacks("e", noImage)
	stage.host("f")
	stage.operator("f", stage.plane.Address())
	stage.asks("shop-2", "e", "f")
	stage.goes("shop-2", "e")
	stage.says(operator.AsAsked, "its place as standby does not go from host 'c' to host 'e': "+noImage)
	stage.asks("shop-2", "f")
	// Once more where the operator was slow to take it back.
	if times := stage.asked("standby e"); times < 3 || times > 4 {
		t.Errorf("host e was asked %d times", times)
	}
	stage.tellsOf("NotMoved", 1)
	stage.bind("shop-2", "f")
	stage.toldLast("standby f")
	stage.standby = "f"
	stage.group("a", 5, true, "b", "d")
	stage.hasStandby("f", "abf")
	if vm := stage.get(); vm.Status.Refusal != nil {
		t.Errorf("%+v", vm.Status.Refusal)
	}
}

// Where there is no other host, the one that refuses is asked until it does not, or another one comes.
func TestAHostThatRefusesIsAskedWhereThereIsNoOther(t *testing.T) {
	stage := newReplaced(t, "a", "b", "d")
	stage.daemons["a"].hostLacks("e", noImage)
	stage.bind("shop-2", "e")
	stage.until("the refusal is said", func(status v1alpha1.ProtectedStatus) bool {
		return status.Refusal != nil && *status.Refusal == (v1alpha1.Refusal{Host: "e", Why: noImage}) && status.Moving != nil && status.Moving.To == "e"
	})
	before := stage.asked("standby e")
	testbed.Until(t, "it is asked again", func() error {
		if stage.asked("standby e") == before {
			return errors.New("it is not")
		}
		return nil
	})
	stage.host("f")
	stage.operator("f", stage.plane.Address())
	stage.bind("shop-2", "f")
	stage.toldLast("standby f")
	stage.standby = "f"
	stage.group("a", 5, true, "b", "d")
	stage.hasStandby("f", "abf")
}

// A VM that gets a standby while it runs gets another one where the first one refuses.
func TestAFirstStandbyThatRefusesIsReplaced(t *testing.T) {
	stage := newStage(t)
	stage.group("a", 5, true, "b", "c")
	for _, name := range []string{"a", "b", "c"} {
		stage.operator(name, stage.plane.Address())
	}
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "a" && status.Backup == "b" })
	for number, node := range []string{"a", "b"} {
		stage.bind([]string{"shop-0", "shop-1"}[number], node)
	}
	stage.daemons["a"].hostLacks("e", noImage)
	for _, name := range []string{"e", "f"} {
		stage.host(name)
		stage.operator(name, stage.plane.Address())
		stage.until("host "+name+" is heard", func(v1alpha1.ProtectedStatus) bool { return stage.isReady(name) })
	}
	stage.strength(3)
	stage.asks("shop-2", "e", "f")
	stage.goes("shop-2", "e")
	stage.says(operator.AsAsked, "host 'e' is not its standby yet: "+noImage)
	stage.says(operator.Placed, "host 'e' does not take the place as standby: its place as standby waits for another node with room")
	stage.bind("shop-2", "f")
	stage.toldLast("standby f")
	stage.standby = "f"
	stage.group("a", 5, true, "b", "c")
	stage.hasStandby("f", "abf")
}

// A drained node's copy goes to another host than the one that refuses it; the group has its old hosts until then.
func TestACopyGoesToAnotherHostThanOneThatRefuses(t *testing.T) {
	stage := newLoss(t, "a", "b", "c")
	stage.daemons["a"].hostLacks("d", noImage)
	stage.operator("d", stage.plane.Address())
	stage.host("e")
	stage.operator("e", stage.plane.Address())
	stage.cordon("b", true)
	stage.evict("shop-1")
	stage.asks("shop-1", "d", "e")
	stage.goes("shop-1", "d")
	stage.bind("shop-1", "e")
	stage.toldLast("backup to e, unprotected meanwhile")
	// Once more where the operator was slow to take it back.
	if times := stage.asked("backup to d"); times < 3 || times > 4 {
		t.Errorf("host d was asked %d times", times)
	}
	stage.group("a", 5, true, "e", "c")
	stage.until("host e has the copy", func(status v1alpha1.ProtectedStatus) bool {
		return status.Moving == nil && status.Backup == "e" && slices.Equal(status.Placement.Members, []string{"a", "e"}) && status.Refusal == nil
	})
}

// Whether a host has KVM its daemon says, and nobody else: an operator in a Pod has another /dev than its node.
func TestADaemonSaysWhetherItsHostHasKVM(t *testing.T) {
	stage := newStage(t)
	says := map[string]any{"a": true, "b": false, "c": nil}
	for name, kvm := range says {
		stage.daemons[name].saysOfKVM(kvm)
		stage.operator(name, stage.plane.Address())
	}
	for name, kvm := range says {
		stage.until("host "+name+" is heard", func(v1alpha1.ProtectedStatus) bool { return stage.isReady(name) })
		host := &v1alpha1.DunlinHost{}
		if err := stage.api.Get(t.Context(), client.ObjectKey{Name: name}, host); err != nil || host.Status.KVM != (kvm == true) {
			t.Errorf("daemon %s says %v, and its DunlinHost %+v, %v", name, kvm, host.Status, err)
		}
	}
}

// A lost copy's Pod asks for hosts that can run what is there: another host has no KVM, which those of the VM have.
func TestALostCopyAsksForHostsThatCanRunIt(t *testing.T) {
	stage := newLoss(t, "a", "b", "c")
	stage.until("host a says what it has", func(v1alpha1.ProtectedStatus) bool { return stage.isReady("a") })
	stage.withoutKVM("d")
	stage.cordon("b", true)
	stage.evict("shop-1")
	stage.says(operator.Placed, "copy 1 stays there, since no other host is heard that has no part in the VM and could have one: host 'd': it has no KVM")
	stage.host("e")
	stage.operator("e", stage.plane.Address())
	stage.asks("shop-1", "e")
	pod, err := stage.pod("shop-1")
	if err != nil {
		t.Fatal(err)
	}
	if needs, said := v1alpha1.ReadNeeds(pod.Annotations); !said || needs.KVM != v1alpha1.KVMNeeded {
		t.Errorf("the copies run under KVM, and the Pod needs %+v", needs)
	}
}

// areHeard waits until these hosts are: one that nobody has heard is lost as one that has fallen silent is.
func (stage *stage) areHeard(names ...string) {
	stage.Helper()
	for _, name := range names {
		stage.until("host "+name+" is heard", func(v1alpha1.ProtectedStatus) bool { return stage.isReady(name) })
	}
}

// isReady says whether a host is heard.
func (stage *stage) isReady(name string) bool {
	host := &v1alpha1.DunlinHost{}
	if err := stage.api.Get(stage.Context(), client.ObjectKey{Name: name}, host); err != nil {
		return false
	}
	return slices.ContainsFunc(host.Status.Conditions, func(condition metav1.Condition) bool {
		return condition.Type == operator.Ready && condition.Status == metav1.ConditionTrue
	})
}

// withoutKVM makes a host that is heard and has no KVM. No operator is there.
func (stage *stage) withoutKVM(name string) {
	stage.Helper()
	made := &v1alpha1.DunlinHost{ObjectMeta: metav1.ObjectMeta{Name: name}}
	stage.create(made)
	before := made.DeepCopy()
	now := metav1.Now().Rfc3339Copy()
	made.Status = v1alpha1.DunlinHostStatus{Heard: &now, Conditions: []metav1.Condition{
		{Type: operator.Ready, Status: metav1.ConditionTrue, Reason: "Test", Message: "said by a test", LastTransitionTime: now},
	}}
	if err := stage.api.Status().Patch(stage.Context(), made, client.MergeFrom(before)); err != nil {
		stage.Fatal(err)
	}
}
