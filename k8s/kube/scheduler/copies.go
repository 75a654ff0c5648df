package scheduler

import (
	"fmt"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourcehelper "k8s.io/component-helpers/resource"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// ClaimAnnotation is the newest ticket that the Pod's place is known by, and the node; "-" where it was taken back.
const ClaimAnnotation = "dunlin.dev/claim"

// taken is the node of a claim that was taken back.
const taken = "-"

// copyOf is a Pod that is a copy.
type copyOf struct {
	// task is NAMESPACE/NAME.
	task     string
	copy     int
	strength int
}

// split takes a task's name apart.
func split(task string) (namespace, name string) {
	namespace, name, _ = strings.Cut(task, "/")
	return namespace, name
}

func (of copyOf) String() string { return fmt.Sprintf("copy %d of %s", of.copy, of.task) }

// isCopy says whether a Pod wants to be one.
func isCopy(pod *v1.Pod) bool {
	strength, there := pod.Labels[v1alpha1.StrengthLabel]
	return there && strength != "1"
}

// readCopy returns what a Pod is a copy of, or why its labels are wrong.
func readCopy(pod *v1.Pod) (copyOf, error) {
	strength, err := strconv.Atoi(pod.Labels[v1alpha1.StrengthLabel])
	if err != nil || strength < 2 || strength > allocation.MostStrength {
		return copyOf{}, fmt.Errorf("label %s is from 1 to %d, not '%s'", v1alpha1.StrengthLabel, allocation.MostStrength, pod.Labels[v1alpha1.StrengthLabel])
	}
	task := pod.Labels[v1alpha1.TaskLabel]
	if task == "" {
		return copyOf{}, fmt.Errorf("label %s has to name the task: it is the same on all %d Pods", v1alpha1.TaskLabel, strength)
	}
	number, err := strconv.Atoi(pod.Labels[v1alpha1.CopyLabel])
	if err != nil || number < 0 || number >= strength {
		return copyOf{}, fmt.Errorf("label %s is from 0 to %d, not '%s'", v1alpha1.CopyLabel, strength-1, pod.Labels[v1alpha1.CopyLabel])
	}
	return copyOf{pod.Namespace + "/" + task, number, strength}, nil
}

// claim is a place by a ticket.
type claim struct {
	ticket uint64
	node   string
}

// claimOf returns a Pod's; the ticket is 0 if it has none.
func claimOf(pod *v1.Pod) claim {
	ticket, node, _ := strings.Cut(pod.Annotations[ClaimAnnotation], " ")
	number, err := strconv.ParseUint(ticket, 10, 64)
	if err != nil || node == "" {
		return claim{}
	}
	return claim{number, node}
}

func (claim claim) String() string { return fmt.Sprintf("%d %s", claim.ticket, claim.node) }

// stands says whether it is one that may still be bound.
func (claim claim) stands() bool { return claim.ticket > 0 && claim.node != taken }

// isAgreed says whether a Pod is a copy, rightly labelled, on the node that it has claimed: what it needs is counted where that was agreed. Any other Pod on a node is one for
// itself, whatever it says of itself.
func isAgreed(pod *v1.Pod) bool {
	_, err := readCopy(pod)
	known := claimOf(pod)
	return err == nil && known.stands() && known.node == pod.Spec.NodeName
}

// hasEnded says whether a Pod needs nothing any more.
func hasEnded(pod *v1.Pod) bool {
	return pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
}

// demand is what a Pod asks for.
func demand(pod *v1.Pod) allocation.Resources {
	return amounts(resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{}), true)
}

// amounts are rounded up for what is needed, and down for what is there. Whoever makes a Pod may ask for any number, also one that fits into no int64: that is as much as an
// amount may be.
func amounts(list v1.ResourceList, up bool) allocation.Resources {
	mebi := func(name v1.ResourceName) int64 {
		quantity := list[name]
		if quantity.CmpInt64(allocation.Most<<20) >= 0 {
			return allocation.Most
		}
		bytes := max(quantity.Value(), 0)
		if up {
			bytes += 1<<20 - 1
		}
		return bytes >> 20
	}
	cpu, milliCPU := list[v1.ResourceCPU], int64(allocation.Most)
	if cpu.CmpInt64(allocation.Most) < 0 {
		milliCPU = min(max(cpu.MilliValue(), 0), milliCPU)
	}
	return allocation.Resources{MilliCPU: milliCPU, MemoryMiB: mebi(v1.ResourceMemory), DiskMiB: mebi(v1.ResourceEphemeralStorage)}
}

// most returns the greater of two in each kind.
func most(one, other allocation.Resources) allocation.Resources {
	return allocation.Resources{
		MilliCPU: max(one.MilliCPU, other.MilliCPU), MemoryMiB: max(one.MemoryMiB, other.MemoryMiB), DiskMiB: max(one.DiskMiB, other.DiskMiB),
	}
}
