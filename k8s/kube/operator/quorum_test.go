package operator_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
)

// A VM's backup and witness die: its primary leads no more, speaks no more, and says so. When the others are back and another one leads, that one speaks.
func TestAVMWithoutAMajorityIsSaidNotToRun(t *testing.T) {
	stage := newStage(t)
	stage.servedByA()
	for name := range stage.daemons {
		stage.operator(name, stage.plane.Address())
	}
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool {
		return status.Primary == "a" && meta.IsStatusConditionTrue(status.Conditions, operator.Running) && meta.IsStatusConditionTrue(status.Conditions, operator.Protected)
	})
	stage.daemons["a"].says(stage.part("primary", "", 5, "quorum-lost", false))
	stage.until("nobody serves it", func(status v1alpha1.ProtectedStatus) bool {
		for _, kind := range []string{operator.Running, operator.Protected} {
			if said := meta.FindStatusCondition(status.Conditions, kind); said.Status != metav1.ConditionFalse || said.Reason != "QuorumLost" {
				return false
			}
		}
		why := meta.FindStatusCondition(status.Conditions, operator.Running).Message
		return status.State == "quorum-lost" && status.Backup == "" && strings.Contains(why, "host 'a', which served it last, has no majority of its hosts")
	})
	stage.daemons["c"].says(stage.part("witness", "b", 6, "running", false))
	stage.daemons["b"].says(stage.part("primary", "b", 6, "alone", false))
	stage.until("host b serves it", func(status v1alpha1.ProtectedStatus) bool {
		return status.Primary == "b" && status.Term == 6 && meta.IsStatusConditionTrue(status.Conditions, operator.Running)
	})
	stage.daemons["a"].isHeard(t, stage.part("primary", "", 5, "quorum-lost", false))
	stage.noneOf("a", 6)
	if status := stage.get().Status; status.State != "alone" || !meta.IsStatusConditionTrue(status.Conditions, operator.Running) {
		t.Errorf("%+v", status)
	}
}
