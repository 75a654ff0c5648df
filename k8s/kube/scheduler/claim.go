package scheduler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// tries is how often a claim begins anew because somebody else has changed a Pod meanwhile.
const tries = 8

// refusal says why a copy may not go there: final for its ticket.
type refusal struct{ why string }

func (refusal refusal) Error() string { return refusal.why }

// errThere says that the copy is bound there by this very ticket.
var errThere = errors.New("it is bound there")

// claims is how copies are kept apart, by what the API server keeps: whoever binds may have stood still for a minute, and what it knows may be old.
//
// The API server changes one object at a time, so that no request can say "bind this Pod if no other copy is on the node". It goes in three steps.
// First the binder writes its ticket and the node into its own Pod, if no newer ticket is there. Then it reads the task's other Pods. Of two
// that claim one node, whoever writes later reads the other's claim: the older ticket gives way, the newer one takes the older one's claim back, by
// a write to that Pod. Last it binds its own Pod as it was when it claimed (resourceVersion), so that a claim which was taken back cannot be bound.
type claims struct{ client kubernetes.Interface }

// claim claims a node for a copy's Pod and returns the Pod as it is then, which is what [claims.bind] takes; or [errThere], or a [refusal].
func (claims claims) claim(ctx context.Context, pod *v1.Pod, wanted claim) (*v1.Pod, error) {
	of, err := readCopy(pod)
	if err != nil {
		return nil, refusal{err.Error()}
	}
	for try := 0; try < tries; try++ {
		own, err := claims.own(ctx, pod, wanted)
		if apierrors.IsConflict(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		err = claims.besideOthers(ctx, own, of, wanted)
		if apierrors.IsConflict(err) {
			continue
		}
		return own, err
	}
	return nil, fmt.Errorf("others change the task's Pods all the time: %d tries", tries)
}

// own writes the claim.
func (claims claims) own(ctx context.Context, pod *v1.Pod, wanted claim) (*v1.Pod, error) {
	// Without a resource version this is what is agreed in etcd, and not what was.
	own, err := claims.client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if own.UID != pod.UID || own.DeletionTimestamp != nil {
		return nil, errors.New("the Pod is another one by now, or is being deleted")
	}
	known := claimOf(own)
	switch {
	case own.Spec.NodeName == wanted.node && known == wanted:
		return nil, errThere
	case own.Spec.NodeName != "":
		return nil, refusal{fmt.Sprintf("the Pod is bound to node '%s'", own.Spec.NodeName)}
	case known.ticket > wanted.ticket:
		return nil, refusal{"the copy is known by a newer ticket"}
	case known == wanted:
		return own, nil
	case known.ticket == wanted.ticket:
		return nil, refusal{"the claim was taken back"}
	}
	return claims.write(ctx, own, wanted)
}

// write changes a Pod's claim, if the Pod is still as it was read.
func (claims claims) write(ctx context.Context, pod *v1.Pod, claim claim) (*v1.Pod, error) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "resourceVersion": pod.ResourceVersion, "annotations": map[string]string{ClaimAnnotation: claim.String()},
	}})
	if err != nil {
		return nil, err
	}
	return claims.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{})
}

// besideOthers looks at the task's other Pods, after the own claim is written.
func (claims claims) besideOthers(ctx context.Context, own *v1.Pod, of copyOf, wanted claim) error {
	selector := labels.SelectorFromSet(labels.Set{v1alpha1.TaskLabel: own.Labels[v1alpha1.TaskLabel]}).String()
	// All that was written before the own claim is what counts, so the server may answer from what it has, once it has that: from etcd it would read every Pod of the
	// namespace for each copy.
	all, err := claims.client.CoreV1().Pods(own.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: selector, ResourceVersion: own.ResourceVersion, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
	})
	if err != nil {
		return err
	}
	for at := range all.Items {
		other := &all.Items[at]
		if other.UID == own.UID || hasEnded(other) {
			continue
		}
		if other.Spec.NodeName == wanted.node {
			return refusal{fmt.Sprintf("node '%s' has Pod '%s' of %s", wanted.node, other.Name, of.task)}
		}
		known := claimOf(other)
		if other.Spec.NodeName != "" || known.node != wanted.node {
			continue
		}
		if known.ticket >= wanted.ticket {
			return refusal{fmt.Sprintf("node '%s' is claimed for Pod '%s' by a newer ticket", wanted.node, other.Name)}
		}
		if _, err := claims.write(ctx, other, claim{known.ticket, taken}); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// bind binds a Pod that was claimed; it is claimed anew where somebody has changed it since.
func (claims claims) bind(ctx context.Context, own *v1.Pod, wanted claim) error {
	for try := 0; try < tries; try++ {
		err := claims.client.CoreV1().Pods(own.Namespace).Bind(ctx, &v1.Binding{
			ObjectMeta: metav1.ObjectMeta{Namespace: own.Namespace, Name: own.Name, UID: own.UID, ResourceVersion: own.ResourceVersion},
			Target:     v1.ObjectReference{Kind: "Node", Name: wanted.node},
		}, metav1.CreateOptions{})
		if !apierrors.IsConflict(err) {
			return err
		}
		if own, err = claims.claim(ctx, own, wanted); err != nil {
			if errors.Is(err, errThere) {
				return nil
			}
			return err
		}
	}
	return fmt.Errorf("others change the Pod all the time: %d tries", tries)
}
