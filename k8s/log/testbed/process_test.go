package testbed

import "testing"

func TestARaceIsOursWhereAFunctionOfThisTreeHasAPart(t *testing.T) {
	const (
		bar   = "==================\n"
		kubes = "WARNING: DATA RACE\nWrite at 0x00c000491260 by goroutine 339:\n  k8s.io/kubernetes/pkg/scheduler/framework.(*PodInfo).Update()\n      k8s.io/kubernetes@v1.34.2/pkg/scheduler/framework/types.go:657 +0xeb4\n"
		begun = "  main.main()\n      dunlin.dev/k8s/kube/cmd/dunlin-scheduler/main.go:14 +0x10b\n"
		ours  = "  dunlin.dev/k8s/kube/scheduler.(*Plugin).PreEnqueue()\n      dunlin.dev/k8s/kube/scheduler/plugin.go:240 +0x28\n"
	)
	said := "it begins\n" + bar + kubes + begun + bar + "it goes on\n" + bar + kubes + ours + begun + bar
	mine, others := races(said)
	if len(mine) != 1 || mine[0] != kubes+ours+begun {
		t.Errorf("of this tree: %q", mine)
	}
	if len(others) != 1 || others[0] != kubes+begun {
		t.Errorf("of others: %q", others)
	}
	// A program that is ended while it writes has no bar at the end.
	if mine, _ := races(bar + kubes + ours); len(mine) != 1 {
		t.Errorf("cut off: %q", mine)
	}
}
