package operator_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// strength asks for another one.
func (stage *stage) strength(strength int) {
	stage.Helper()
	change := fmt.Sprintf(`{"spec":{"strength":%d}}`, strength)
	if err := stage.api.Patch(context.Background(), stage.get(), client.RawPatch(types.MergePatchType, []byte(change))); err != nil {
		stage.Fatal(err)
	}
}

// labelled waits until the VM's Pods are these, and all say this R.
func (stage *stage) labelled(pods int, strength string) {
	stage.Helper()
	stage.until(fmt.Sprintf("%d Pods say that R is %s", pods, strength), func(v1alpha1.ProtectedStatus) bool {
		for number := range pods + 1 {
			pod, err := stage.pod(fmt.Sprintf("shop-%d", number))
			if number == pods {
				return err != nil
			}
			if err != nil || pod.Labels[v1alpha1.StrengthLabel] != strength || pod.Labels[v1alpha1.CopyLabel] != fmt.Sprint(number) {
				return false
			}
		}
		return true
	})
}

// toldLast waits until that was the last order that host a's daemon was given.
func (stage *stage) toldLast(order string) {
	stage.Helper()
	testbed.Until(stage.T, "the last order is "+order, func() error {
		if told := stage.daemons["a"].told(); len(told) == 0 || told[len(told)-1] != order {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
}

// A VM with two copies gets a standby while it runs, and loses it again. Its Pods say the new R, the first copy's last; the daemons name the standby only when that
// host has remembered that it may have something of the VM.
func TestAChangedStrengthIsCarriedOut(t *testing.T) {
	stage := newStage(t)
	stage.group("a", 5, true, "b", "c")
	for _, name := range []string{"a", "b", "c"} {
		stage.operator(name, stage.plane.Address())
	}
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "a" && status.Backup == "b" })
	stage.labelled(2, "2")
	for number, node := range []string{"a", "b"} {
		stage.bind(fmt.Sprintf("shop-%d", number), node)
	}
	stage.strength(3)
	stage.says(operator.AsAsked, "it has no standby yet: that waits for a node with room whose host is heard and has no part in it")
	// Another host comes.
	stage.host("d")
	stage.operator("d", stage.plane.Address())
	stage.labelled(3, "3")
	pod, err := stage.pod("shop-2")
	if err != nil {
		t.Fatal(err)
	}
	if wish := fmt.Sprint(pod.Spec.Affinity); !strings.Contains(wish, "[d]") {
		t.Errorf("the standby's Pod asks for %s", wish)
	}
	stage.daemons["a"].refuse("it has no images")
	stage.bind("shop-2", "d")
	stage.toldLast("standby d")
	stage.remembers("d", true)
	stage.says(operator.AsAsked, "host 'd' is not its standby yet: it has no images")
	stage.daemons["a"].refuse("")
	stage.standby = "d"
	stage.group("a", 5, true, "b", "c")
	stage.until("it has a standby, as asked", func(status v1alpha1.ProtectedStatus) bool {
		return status.Standby == "d" && status.Placement.Strength == 3 && slices.Equal(status.Placement.Copies, []string{"a", "b", "d"}) &&
			says(&v1alpha1.ProtectedVM{Status: status}, operator.AsAsked, "True", "as its spec says") &&
			says(&v1alpha1.ProtectedVM{Status: status}, operator.Placed, "True", "its standby is d")
	})

	stage.strength(2)
	stage.toldLast("no standby")
	stage.labelled(3, "3") // the daemons have one
	stage.standby = ""
	stage.group("a", 5, true, "b", "c")
	stage.until("it has no standby, as asked", func(status v1alpha1.ProtectedStatus) bool {
		return status.Standby == "" && status.Placement.Strength == 2 && status.Placement.Copies == nil && status.Placement.Standby == "" &&
			says(&v1alpha1.ProtectedVM{Status: status}, operator.AsAsked, "True", "as its spec says")
	})
	stage.labelled(2, "2")
	for number, node := range []string{"a", "b"} {
		if pod, err := stage.pod(fmt.Sprintf("shop-%d", number)); err != nil || pod.Spec.NodeName != node {
			t.Errorf("Pod %d is on node '%s', %v", number, pod.Spec.NodeName, err)
		}
	}
	for name, daemon := range stage.daemons {
		if told := daemon.told(); name != "a" && len(told) > 0 {
			t.Errorf("host %s is told %v", name, told)
		}
	}
}
