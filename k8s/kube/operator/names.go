package operator

import (
	"context"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

const (
	// Finalizer keeps a ProtectedVM until its VM has ended on its hosts.
	Finalizer = "dunlin.dev/vm"
	// ProgramFinalizer keeps a ProtectedProgram until its program has.
	ProgramFinalizer = "dunlin.dev/program"
	// VMLabel is on the Pods that stand for a ProtectedVM's copies: its name.
	VMLabel = "dunlin.dev/vm"
	// ProgramLabel is on those of a ProtectedProgram.
	ProgramLabel = "dunlin.dev/program"
	// NumberLabel is a copy's number, also where the Pod is not placed by agreement any more.
	NumberLabel = "dunlin.dev/number"
)

// The conditions of a ProtectedVM or a ProtectedProgram, and Ready of a DunlinHost.
const (
	// Placed: its copies have nodes, and Pods stand for them there.
	Placed = "Placed"
	// Running: a primary serves it.
	Running = "Running"
	// Protected: a second complete copy exists.
	Protected = "Protected"
	// AsAsked: what the spec says now is carried out.
	AsAsked = "AsAsked"
	// Ready: the host's daemon answers.
	Ready = "Ready"
)

// The parts that can go to another host.
const (
	PartBackup  = string(control.Backup)
	PartWitness = string(control.Witness)
	PartStandby = "standby"
)

// partWords are what a person calls them.
var partWords = map[string]string{PartBackup: "copy", PartWitness: "place as witness", PartStandby: "place as standby"}

// NameOnHosts is an object's there: its own and part of its UID, so that no other object, and nothing that a person starts by hand, is taken for it. It has at
// most 61 characters, and a daemon takes 64.
func NameOnHosts(object v1alpha1.Protected) string {
	return object.GetName() + "." + strings.ReplaceAll(string(object.GetUID()), "-", "")[:12]
}

// set sets a condition.
func set(conditions *[]metav1.Condition, generation int64, kind string, is metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(conditions, metav1.Condition{Type: kind, Status: is, Reason: reason, Message: message, ObservedGeneration: generation})
}

func truth(is bool) metav1.ConditionStatus {
	if is {
		return metav1.ConditionTrue
	}
	return metav1.ConditionFalse
}

// change writes an object's status where it becomes another one, if nobody else has changed the object since it was read.
func change(ctx context.Context, api client.Client, object v1alpha1.Protected, edit func(*v1alpha1.ProtectedStatus)) error {
	before := copyOf(object)
	edit(object.Seen())
	if equality.Semantic.DeepEqual(before.Seen(), object.Seen()) {
		return nil
	}
	return api.Status().Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// settle is what becomes of a turn: where somebody else has changed the object meanwhile, it is looked at again.
func settle(result ctrl.Result, err error) (ctrl.Result, error) {
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: soon}, nil
	}
	return result, err
}

// isHeard says whether a host's operator is there, and its daemon answers.
func isHeard(host *v1alpha1.DunlinHost) bool {
	return meta.IsStatusConditionTrue(host.Status.Conditions, Ready)
}

func has(list []string, name string) bool {
	for _, other := range list {
		if other == name {
			return true
		}
	}
	return false
}

func without(list []string, name string) []string {
	var rest []string
	for _, other := range list {
		if other != name {
			rest = append(rest, other)
		}
	}
	return rest
}

// isGone says whether a Pod is on its way out, or has ended.
func isGone(pod *v1.Pod) bool {
	return pod.DeletionTimestamp != nil || pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
}
