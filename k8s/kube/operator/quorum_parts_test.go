package operator

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// gauges are what a gauge says, one of each object.
func gauges(t *testing.T, of prometheus.Collector) (said []float64) {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(of)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			said = append(said, metric.GetGauge().GetValue())
		}
	}
	return said
}

// Where nobody leads, the host that served last says that nobody serves, and an alert on what is not protected fires. All others say nothing of it.
func TestWhoServedLastSaysThatNobodyServes(t *testing.T) {
	for _, one := range []struct {
		host, role, leader, state string
		term                      uint64
		reason                    string
	}{
		{"a", "primary", "", "quorum-lost", 5, "QuorumLost"}, {"a", "primary", "", "quorum-lost", 6, "QuorumLost"}, {"a", "primary", "", "failed", 5, "Failed"},
		{"a", "none", "", "failed", 5, "Failed"}, {"a", "primary", "", "quorum-lost", 4, ""}, {"b", "backup", "", "quorum-lost", 5, ""}, {"b", "primary", "", "quorum-lost", 5, ""},
		{"a", "primary", "b", "quorum-lost", 6, ""}, {"a", "primary", "", "running", 5, ""}, {"a", "backup", "", "quorum-lost", 5, ""},
	} {
		vm, there := shop(), &v1alpha1.DunlinHost{}
		set(&there.Status.Conditions, 1, Ready, metav1.ConditionTrue, "Test", "")
		vm.Status.Primary, vm.Status.Backup, vm.Status.Term, vm.Status.State = "a", "b", 5, "running"
		for _, condition := range []string{Running, Protected} {
			set(&vm.Status.Conditions, 1, condition, metav1.ConditionTrue, "Test", "")
		}
		protectedVMs.WithLabelValues(vm.Namespace, vm.Name).Set(1)
		here := control.VM{Name: NameOnHosts(vm), Role: one.role, Leader: one.leader, State: one.state, Term: one.term}
		host := &host{Client: known{host: there}, name: one.host}
		// While it is handed over, nobody leads for a moment.
		if _, err := host.serve(context.Background(), vm, here); err != nil {
			t.Fatal(err)
		}
		if now := meta.FindStatusCondition(vm.Status.Conditions, Running); here.State == "quorum-lost" && now.Status != metav1.ConditionTrue {
			t.Errorf("%+v, at once: %+v", one, now)
		}
		if _, is := host.mute.Load(here.Name); is {
			host.mute.Store(here.Name, time.Now().Add(-handOver))
		}
		if _, err := host.serve(context.Background(), vm, here); err != nil {
			t.Fatal(err)
		}
		said := gauges(t, protectedVMs)
		if one.reason == "" {
			if !meta.IsStatusConditionTrue(vm.Status.Conditions, Running) || !meta.IsStatusConditionTrue(vm.Status.Conditions, Protected) || vm.Status.State != "running" || len(said) > 0 {
				t.Errorf("%+v: %+v, %v", one, vm.Status, said)
			}
			continue
		}
		for _, condition := range []string{Running, Protected} {
			if now := meta.FindStatusCondition(vm.Status.Conditions, condition); now.Status != metav1.ConditionFalse || now.Reason != one.reason {
				t.Errorf("%+v: %+v", one, now)
			}
		}
		if vm.Status.State != one.state || vm.Status.Backup != "" || vm.Status.Term != 5 || len(said) != 1 || said[0] != 0 {
			t.Errorf("%+v: %+v, %v", one, vm.Status, said)
		}
		forget(vm)
	}
}
