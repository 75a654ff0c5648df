package operator_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

func named(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, Namespace: "default"}
}

func now() metav1.Time { return metav1.Now().Rfc3339Copy() }

// part is a host's in the VM, as its daemon tells of it.
func (stage *stage) part(role, leader string, term uint64, state string, protected bool) control.VM {
	vm := stage.get()
	return control.VM{Name: operator.NameOnHosts(vm), Role: role, State: state, Protected: protected, Policy: vm.Spec.Policy, Leader: leader, Term: term}
}

// servedByA has host a serve the VM in term 5.
func (stage *stage) servedByA() {
	stage.Helper()
	stage.daemons["a"].says(stage.part("primary", "a", 5, "running", true))
	stage.daemons["b"].says(stage.part("backup", "a", 5, "running", false))
	stage.daemons["c"].says(stage.part("witness", "a", 5, "running", false))
}

// noneOf looks that no version of the object since the first one of this term has words of that host's, or an earlier term.
func (stage *stage) noneOf(host string, term int64) {
	stage.Helper()
	begun := false
	for _, vm := range stage.all() {
		begun = begun || vm.Status.Term >= term
		if !begun {
			continue
		}
		if vm.Status.Term < term || vm.Status.Primary == host || strings.Contains(fmt.Sprint(vm.Status), "said by "+host) {
			stage.Errorf("term %d was told of, and then host %s speaks: %+v", term, host, vm.Status)
		}
	}
	if !begun {
		stage.Errorf("term %d was never told of", term)
	}
}

// A primary is cut off from the other hosts while its operator still reaches the API server. Whatever its daemon believes, the host that leads in the later
// term speaks for the object, and is told what to do.
func TestOnlyTheHostThatLeadsInTheNewestTermSpeaks(t *testing.T) {
	stage := newStage(t)
	stage.servedByA()
	for name := range stage.daemons {
		stage.operator(name, stage.plane.Address())
	}
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool {
		return status.Primary == "a" && status.Term == 5 && status.State == "running" && status.Backup == "b"
	})
	// A backup sees the same VM in the same term, and is not who speaks.
	stage.daemons["b"].isHeard(t, stage.part("backup", "a", 5, "joining: said by b", false))
	stage.noneOf("b", 5)

	// The first host is cut off: it finds no majority, and for a while nobody knows better.
	stage.daemons["a"].says(stage.part("primary", "a", 5, "quorum-lost", false))
	stage.until("host a has no majority", func(status v1alpha1.ProtectedStatus) bool { return status.State == "quorum-lost" })
	stage.daemons["c"].says(stage.part("witness", "b", 6, "running", false))
	stage.daemons["b"].says(stage.part("primary", "b", 6, "alone", false))
	took := stage.until("host b serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "b" && status.Term == 6 })

	// Its daemon goes on to say that it serves the VM, and more: its node is drained, and another policy is asked for.
	node := lab.Node("a", "", "4", "4Gi")
	if err := stage.api.Patch(context.Background(), node, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`))); err != nil {
		t.Fatal(err)
	}
	stage.daemons["a"].isHeard(t, stage.part("primary", "a", 5, "running: said by a", true))
	if err := stage.api.Patch(context.Background(), stage.get(), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"policy":"remus"}}`))); err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "host b is told of the other policy", func() error {
		if told := stage.daemons["b"].told(); len(told) == 0 || told[0] != "policy remus" {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
	stage.daemons["b"].says(stage.part("primary", "b", 6, "alone", false))
	stale := stage.part("primary", "a", 5, "running: said by a", true)
	stale.Policy = "dunlin"
	stage.daemons["a"].isHeard(t, stale)
	stage.noneOf("a", 6)

	// It is deleted: host b ends it, and not whoever believes that it leads.
	stage.delete()
	testbed.Until(t, "host b is told to end it", func() error {
		if told := stage.daemons["b"].told(); told[len(told)-1] != "down" {
			return fmt.Errorf("it is told %v", told)
		}
		return nil
	})
	stage.daemons["a"].isHeard(t, stale)
	if told := stage.daemons["a"].told(); len(told) > 0 {
		t.Errorf("host a is cut off, and is told to %v", told)
	}
	stage.noneOf("a", 6)
	if last := stage.get().Status.LastFailOver; !last.Equal(took.LastFailOver) {
		t.Errorf("it failed over at %v, and at %v again", took.LastFailOver, last)
	}
	stage.tellsOf("FailedOver", 1)
	// That host is there, and says so as soon as it has nothing of the VM any more.
	stage.daemons["a"].says()
	stage.until("host a has nothing of it", func(status v1alpha1.ProtectedStatus) bool { return len(status.Gone) == 1 && status.Gone[0] == "a" })
}

// A word of the first host's is on its way to the API server when it is cut off, and arrives after the other one has spoken.
func TestAWordThatComesLateIsRefused(t *testing.T) {
	stage := newStage(t)
	stage.servedByA()
	proxy := stage.plane.BeginProxy(t)
	// Another one is elected: what is held is said by the host that serves the VM, and by nobody else.
	stage.operator("b", stage.plane.Address())
	stage.operator("c", stage.plane.Address())
	testbed.Until(t, "another one is elected", func() error {
		if finalizers := stage.get().Finalizers; !slices.Contains(finalizers, operator.Finalizer) {
			return fmt.Errorf("finalizers are %v", finalizers)
		}
		return nil
	})
	stage.operator("a", proxy.Address)
	stage.until("host a serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "a" && status.Backup == "b" })
	proxy.Hold(func(in *http.Request) bool {
		return in.Method == http.MethodPatch && strings.HasSuffix(in.URL.Path, "/protectedvms/shop/status")
	})
	stage.daemons["a"].says(stage.part("primary", "a", 5, "alone: said by a", false))
	testbed.Until(t, "host a's word is on its way", func() error {
		if proxy.Waiting() == 0 {
			return fmt.Errorf("it says nothing")
		}
		return nil
	})
	stage.daemons["b"].says(stage.part("primary", "b", 6, "alone", false))
	stage.until("host b serves it", func(status v1alpha1.ProtectedStatus) bool { return status.Primary == "b" && status.Term == 6 })
	proxy.Hold(nil)
	testbed.Until(t, "host a's word has arrived", func() error {
		for _, request := range proxy.Done() {
			if request.Held && request.Status == http.StatusConflict {
				return nil
			}
			if request.Held {
				t.Fatalf("it came late, and the server answers %d", request.Status)
			}
		}
		return fmt.Errorf("it has not")
	})
	stage.daemons["a"].isHeard(t, stage.part("primary", "a", 5, "alone: said by a", false))
	stage.noneOf("a", 6)
}
