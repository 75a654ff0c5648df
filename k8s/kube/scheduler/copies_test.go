package scheduler

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"dunlin.dev/k8s/allocation"
)

// Whatever a Pod asks for, it is an amount that can be agreed on.
func TestNoPodAsksForMoreThanAnAmountMayBe(t *testing.T) {
	const gibi = 1 << 10
	for _, one := range []struct {
		cpu, memory string
		containers  int
		needs       allocation.Resources
	}{
		{"100m", "1Gi", 1, allocation.Resources{MilliCPU: 100, MemoryMiB: gibi}},
		{"1", "1", 2, allocation.Resources{MilliCPU: 2000, MemoryMiB: 1}},
		{"2G", "2Ei", 1, allocation.Resources{MilliCPU: allocation.Most, MemoryMiB: allocation.Most}},
		{"1T", "1Ei", 1, allocation.Resources{MilliCPU: allocation.Most, MemoryMiB: allocation.Most}},
		{"1n", "1152921504606846975", 1, allocation.Resources{MilliCPU: 1, MemoryMiB: allocation.Most}},
		{"9223372036854775807", "9223372036854775807", 1, allocation.Resources{MilliCPU: allocation.Most, MemoryMiB: allocation.Most}},
		// Together they are 2^64.
		{"2E", "2Ei", 8, allocation.Resources{MilliCPU: allocation.Most, MemoryMiB: allocation.Most}},
		{"-1", "-1Gi", 1, allocation.Resources{}},
	} {
		pod := &v1.Pod{}
		for range one.containers {
			pod.Spec.Containers = append(pod.Spec.Containers, v1.Container{Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
				v1.ResourceCPU: resource.MustParse(one.cpu), v1.ResourceMemory: resource.MustParse(one.memory),
			}}})
		}
		if needs := demand(pod); needs != one.needs {
			t.Errorf("%d containers with %s CPU and %s memory need %v, not %v", one.containers, one.cpu, one.memory, needs, one.needs)
		}
	}
	// What a node has is rounded down, and bounded too.
	has := amounts(v1.ResourceList{v1.ResourceMemory: resource.MustParse("1048575"), v1.ResourceEphemeralStorage: resource.MustParse("4Ei")}, false)
	if has != (allocation.Resources{DiskMiB: allocation.Most}) {
		t.Errorf("the node has %v", has)
	}
}
