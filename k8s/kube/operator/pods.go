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
	// besideProgramMiB is what a program's copy takes beside its own limit: the log, frames, and inputs that wait for it (docs/budgets.md).
	besideProgramMiB = 256
)

// pod is the one that stands for a copy. It holds the copy's processors and memory on its node, so that Kubernetes counts them, and runs nothing: the
// copy belongs to the node's daemon, which holds QEMU or the program by open descriptors, and ends when its group has agreed to it and not when a kubelet thinks so.
//
// Before the VM or the program has its hosts, a task's Pods are placed by agreement (on is empty). Afterwards a Pod that is lost is made anew as an ordinary one for
// the copy's own host: a copy cannot move to another host yet.
func pod(object v1alpha1.Protected, number, strength int, on, image string) *v1.Pod {
	kind := kindOf(object)
	labels := map[string]string{kind.label: object.GetName(), NumberLabel: strconv.Itoa(number), scheduler.StrengthLabel: "1"}
	if on == "" {
		labels[scheduler.StrengthLabel] = strconv.Itoa(strength)
		labels[scheduler.TaskLabel] = object.GetName()
		labels[scheduler.CopyLabel] = strconv.Itoa(number)
	}
	yes, no, nobody, now := true, false, int64(65534), int64(0)
	made := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: podName(object, number), Namespace: object.GetNamespace(), Labels: labels,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: v1alpha1.Version.String(), Kind: kind.name, Name: object.GetName(), UID: object.GetUID(), Controller: &yes,
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
				Resources: v1.ResourceRequirements{Requests: kind.needs(object)},
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

func podName(object v1alpha1.Protected, number int) string {
	return fmt.Sprintf("%s-%d", object.GetName(), number)
}

// numberOf is a copy's number; -1 of a Pod that says none.
func numberOf(pod *v1.Pod) int {
	number, err := strconv.Atoi(pod.Labels[NumberLabel])
	if err != nil {
		return -1
	}
	return number
}

func needsOfVM(object v1alpha1.Protected) v1.ResourceList {
	vm := object.(*v1alpha1.ProtectedVM).Spec.VM
	return needs(1000*int64(max(vm.VCPUs, 1)), vm.MemoryMiB+besideMiB+diskMiB*int64(len(vm.Disks)))
}

func needsOfProgram(object v1alpha1.Protected) v1.ResourceList {
	program := object.(*v1alpha1.ProtectedProgram).Spec.Program
	return needs(program.MilliCPU, program.MemoryMiB+besideProgramMiB)
}

func needs(milliCPU, memoryMiB int64) v1.ResourceList {
	return v1.ResourceList{
		v1.ResourceCPU:    *resource.NewMilliQuantity(milliCPU, resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(memoryMiB<<20, resource.BinarySI),
	}
}
