package operator

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// kind is what is not the same of VMs and programs. Everything else in this package is for both.
type kind struct {
	// name is the kind's in Kubernetes, and word what a person calls one on its hosts.
	name, word string
	// finalizer keeps an object until what it stands for has ended on its hosts.
	finalizer string
	// label is on the Pods that stand for copies: the object's name.
	label string
	// ends is how one ends that nobody has ended.
	ends string
	// empty and list are what the API server's answers are read into.
	empty func() v1alpha1.Protected
	list  func() client.ObjectList
	// needs is what a copy takes of its node.
	needs func(v1alpha1.Protected) v1.ResourceList
	// protected and failOvers are told to Prometheus.
	protected *prometheus.GaugeVec
	failOvers *prometheus.CounterVec
}

var (
	vms = &kind{
		name: "ProtectedVM", word: "VM", finalizer: Finalizer, label: VMLabel, ends: "its guest switched itself off",
		empty: func() v1alpha1.Protected { return &v1alpha1.ProtectedVM{} },
		list:  func() client.ObjectList { return &v1alpha1.ProtectedVMList{} },
		needs: needsOfVM, protected: protectedVMs, failOvers: failOvers,
	}
	programs = &kind{
		name: "ProtectedProgram", word: "program", finalizer: ProgramFinalizer, label: ProgramLabel, ends: "it ended by itself",
		empty: func() v1alpha1.Protected { return &v1alpha1.ProtectedProgram{} },
		list:  func() client.ObjectList { return &v1alpha1.ProtectedProgramList{} },
		needs: needsOfProgram, protected: protectedPrograms, failOvers: programFailOvers,
	}
	// kinds are all of them.
	kinds = []*kind{vms, programs}
)

// kindOf is an object's.
func kindOf(object v1alpha1.Protected) *kind {
	if _, is := object.(*v1alpha1.ProtectedProgram); is {
		return programs
	}
	return vms
}

// kindNamed is the one of this name; a ProtectedVM's where none is named.
func kindNamed(name string) *kind {
	if name == programs.name {
		return programs
	}
	return vms
}

// all are the objects of a kind.
func (kind *kind) all(ctx context.Context, reader client.Reader, options ...client.ListOption) ([]v1alpha1.Protected, error) {
	list := kind.list()
	if err := reader.List(ctx, list, options...); err != nil {
		return nil, err
	}
	var all []v1alpha1.Protected
	err := meta.EachListItem(list, func(item runtime.Object) error {
		all = append(all, item.(v1alpha1.Protected))
		return nil
	})
	return all, err
}

// each looks at one object of a kind after the other.
func (kind *kind) each(reader client.Reader, look func(context.Context, v1alpha1.Protected) (ctrl.Result, error)) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
		object := kind.empty()
		if err := reader.Get(ctx, request.NamespacedName, object); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
		return settle(look(ctx, object))
	})
}

// copyOf is an object that may be changed.
func copyOf(object v1alpha1.Protected) v1alpha1.Protected {
	return object.DeepCopyObject().(v1alpha1.Protected)
}
