package operator

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// What is told beside what controller-runtime counts, by the operator on the host that serves a VM or a program.
var (
	protectedVMs = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "dunlin_operator_vm_protected", Help: "1 if a complete second copy of a ProtectedVM exists.",
	}, []string{"namespace", "name"})
	failOvers = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "dunlin_operator_fail_overs_total", Help: "Times that this host took a ProtectedVM over.",
	}, []string{"namespace", "name"})
	protectedPrograms = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "dunlin_operator_program_protected", Help: "1 if a complete second copy of a ProtectedProgram exists.",
	}, []string{"namespace", "name"})
	programFailOvers = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "dunlin_operator_program_fail_overs_total", Help: "Times that this host took a ProtectedProgram over.",
	}, []string{"namespace", "name"})
)

func init() {
	metrics.Registry.MustRegister(protectedVMs, failOvers, protectedPrograms, programFailOvers)
}

// forget says nothing more of what this host does not serve.
func forget(object v1alpha1.Protected) {
	kindOf(object).protected.DeleteLabelValues(object.GetNamespace(), object.GetName())
}
