package operator

import (
	"fmt"
	"strconv"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/scheduler"
)

const (
	// besideMiB is what a copy takes beside its guest's memory: QEMU, the log, frames, and a sync on its way (docs/budgets.md).
	besideMiB = 512
	// diskMiB is what a backup may hold for each disk: disk_memory_mib.
	diskMiB = 512
)

// pod is the one that stands for a copy. It holds the copy's processors and memory on its node, so that Kubernetes counts them, and runs nothing: the
// copy belongs to the node's daemon, which holds QEMU by open descriptors, and ends when its group has agreed to it and not when a kubelet thinks so.
//
// Before the VM has its hosts, a task's Pods are placed by agreement (on is empty). Afterwards a Pod that is lost is made anew as an ordinary one for
// the copy's own host: a copy cannot move to another host yet.
func pod(vm *v1alpha1.ProtectedVM, number, strength int, on, image string) *v1.Pod {
	labels := map[string]string{VMLabel: vm.Name, NumberLabel: strconv.Itoa(number), scheduler.StrengthLabel: "1"}
	if on == "" {
		labels[scheduler.StrengthLabel] = strconv.Itoa(strength)
		labels[scheduler.TaskLabel] = vm.Name
		labels[scheduler.CopyLabel] = strconv.Itoa(number)
	}
	yes, no, nobody, now := true, false, int64(65534), int64(0)
	memory := vm.Spec.VM.MemoryMiB + besideMiB + diskMiB*int64(len(vm.Spec.VM.Disks))
	made := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: podName(vm, number), Namespace: vm.Namespace, Labels: labels,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: v1alpha1.Version.String(), Kind: "ProtectedVM", Name: vm.Name, UID: vm.UID, Controller: &yes,
			}},
		},
		Spec: v1.PodSpec{
			SchedulerName:                "dunlin-scheduler",
			AutomountServiceAccountToken: &no,
			EnableServiceLinks:           &no,
			// Nothing in it needs time to end.
			TerminationGracePeriodSeconds: &now,
			// An unreachable node's copy comes back with its node, so its place is kept.
			Tolerations: []v1.Toleration{
				{Key: v1.TaintNodeNotReady, Operator: v1.TolerationOpExists, Effect: v1.TaintEffectNoExecute},
				{Key: v1.TaintNodeUnreachable, Operator: v1.TolerationOpExists, Effect: v1.TaintEffectNoExecute},
			},
			SecurityContext: &v1.PodSecurityContext{
				RunAsNonRoot: &yes, RunAsUser: &nobody, SeccompProfile: &v1.SeccompProfile{Type: v1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []v1.Container{{
				Name: "stands-for-a-copy", Image: image,
				Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
					v1.ResourceCPU:    *resource.NewQuantity(int64(max(vm.Spec.VM.VCPUs, 1)), resource.DecimalSI),
					v1.ResourceMemory: *resource.NewQuantity(memory<<20, resource.BinarySI),
				}},
				SecurityContext: &v1.SecurityContext{
					AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes, Capabilities: &v1.Capabilities{Drop: []v1.Capability{"ALL"}},
				},
			}},
		},
	}
	if on != "" {
		there := v1.NodeSelectorTerm{MatchFields: []v1.NodeSelectorRequirement{{Key: "metadata.name", Operator: v1.NodeSelectorOpIn, Values: []string{on}}}}
		made.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{there}},
		}}
	}
	return made
}

func podName(vm *v1alpha1.ProtectedVM, number int) string {
	return fmt.Sprintf("%s-%d", vm.Name, number)
}

// numberOf is a copy's number; -1 of a Pod that says none.
func numberOf(pod *v1.Pod) int {
	number, err := strconv.Atoi(pod.Labels[NumberLabel])
	if err != nil {
		return -1
	}
	return number
}
