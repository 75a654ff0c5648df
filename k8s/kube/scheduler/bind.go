package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

const (
	// together is how long a copy waits for the others to claim their nodes. A bind has ten seconds in all.
	together = 8 * time.Second
	// made is how long a bind waits for its Pod to be made.
	made = 2 * time.Second
	// again is when the queue is asked again for a Pod that it did not know yet: nothing tells when it does.
	again = 250 * time.Millisecond
	// betweenReadings is how long nobody reads all copies again to see whether one is gone, as long as the informer has it: that may take as long as its grace period.
	betweenReadings = time.Second
)

// Bind makes a copy's Pod go through the scheduling queue to its node, and answers with what came of it.
func (cluster cluster) Bind(ctx context.Context, bind allocation.BindTask) (allocation.Outcome, error) {
	pod, there, err := cluster.untilMade(ctx, bind.Binding)
	if err != nil {
		return allocation.Failed, err
	}
	if there {
		return allocation.Done, nil
	}
	attempt := &attempt{bind: bind, ended: make(chan error, 1)}
	cluster.mutex.Lock()
	if cluster.wanted[pod.UID] != nil {
		cluster.mutex.Unlock()
		return allocation.Failed, fmt.Errorf("Pod '%s/%s': an earlier try is still under way", pod.Namespace, pod.Name)
	}
	cluster.wanted[pod.UID] = attempt
	cluster.mutex.Unlock()
	defer func() {
		cluster.mutex.Lock()
		defer cluster.mutex.Unlock()
		delete(cluster.wanted, pod.UID)
	}()
	ticker := time.NewTicker(again)
	defer ticker.Stop()
	for {
		cluster.handle.Activate(klog.Background(), map[string]*v1.Pod{string(pod.UID): pod})
		select {
		case err := <-attempt.ended:
			return cluster.outcome(bind, err)
		case <-ctx.Done():
			return allocation.Failed, fmt.Errorf("Pod '%s/%s' is not bound in time", pod.Namespace, pod.Name)
		case <-ticker.C:
		}
	}
}

func (cluster cluster) outcome(bind allocation.BindTask, err error) (allocation.Outcome, error) {
	var refused refusal
	switch {
	case err == nil || errors.Is(err, errThere):
		return allocation.Done, nil
	case errors.As(err, &refused):
		cluster.say(fmt.Sprintf("copy %d of %s does not go to node '%s': %s", bind.Copy, bind.Task.Name, bind.Node, refused.why))
		return allocation.Refused, nil
	}
	return allocation.Failed, fmt.Errorf("copy %d of %s: %w", bind.Copy, bind.Task.Name, err)
}

// untilMade returns the copy's Pod that is to be bound, or that it is bound as it is to be.
func (cluster cluster) untilMade(ctx context.Context, binding allocation.Binding) (pod *v1.Pod, there bool, err error) {
	timer := time.NewTimer(made)
	defer timer.Stop()
	for {
		news := cluster.next()
		for _, pod := range cluster.known(binding.Task) {
			of, err := readCopy(pod)
			if err != nil || of.copy != binding.Copy || hasEnded(pod) || pod.DeletionTimestamp != nil {
				continue
			}
			if pod.Spec.NodeName == "" {
				return pod, false, nil
			}
			if (claimOf(pod) == claim{binding.Ticket, binding.Node}) && pod.Spec.NodeName == binding.Node {
				return pod, true, nil
			}
		}
		select {
		case <-news:
		case <-timer.C:
			return nil, false, fmt.Errorf("copy %d of %s has no Pod to bind yet", binding.Copy, binding.Task)
		case <-ctx.Done():
			return nil, false, ctx.Err()
		}
	}
}

// known are a task's Pods, as the informer has them.
func (plugin *Plugin) known(task string) []*v1.Pod {
	objects, err := plugin.pods.ByIndex(byTask, task)
	if err != nil {
		return nil
	}
	var pods []*v1.Pod
	for _, object := range objects {
		if pod, ok := object.(*v1.Pod); ok {
			pods = append(pods, pod)
		}
	}
	return pods
}

// untilAllHaveClaimed waits until all copies of the task have a node claimed, or one is bound already: then this one takes a lost copy's place, or the
// others did not wait for it in vain.
func (plugin *Plugin) untilAllHaveClaimed(ctx context.Context, attempt *attempt) error {
	timer := time.NewTimer(together)
	defer timer.Stop()
	for {
		news := plugin.next()
		claimed := map[int]bool{attempt.bind.Copy: true}
		for _, pod := range plugin.known(attempt.bind.Task.Name) {
			of, err := readCopy(pod)
			if err != nil || hasEnded(pod) || !claimOf(pod).stands() {
				continue
			}
			if pod.Spec.NodeName != "" {
				return nil
			}
			if pod.DeletionTimestamp == nil {
				claimed[of.copy] = true
			}
		}
		if len(claimed) >= attempt.bind.Task.Strength {
			return nil
		}
		select {
		case <-news:
		case <-timer.C:
			return fmt.Errorf("%d of %d copies have a node claimed", len(claimed), attempt.bind.Task.Strength)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Unbind deletes a copy's Pod, if it is there by this ticket, and answers when it is gone.
func (cluster cluster) Unbind(ctx context.Context, binding allocation.Binding) (allocation.Outcome, error) {
	for {
		pod, err := cluster.bound(ctx, binding)
		if err != nil {
			return allocation.Failed, err
		}
		if pod == nil {
			return allocation.Done, nil
		}
		if pod.DeletionTimestamp == nil || !cluster.lives(binding.Node) {
			options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}}
			if !cluster.lives(binding.Node) {
				// Nobody there says when it has ended. What a copy that still runs may say is decided by its group, and not by its Pod.
				options.GracePeriodSeconds = new(int64)
			}
			err := cluster.claims.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, options)
			if err != nil && !apierrors.IsNotFound(err) {
				return allocation.Failed, err
			}
		}
		if cluster.untilOther(ctx, pod); ctx.Err() != nil {
			return allocation.Failed, fmt.Errorf("Pod '%s/%s' takes long to end", pod.Namespace, pod.Name)
		}
	}
}

// untilOther waits, no longer than [betweenReadings], until the informers tell something else of a bound Pod: that it is gone, or that its node is heard of no more. Where it stays for
// a while (its grace period, or a finalizer), it is neither deleted again nor looked for before this.
func (cluster cluster) untilOther(ctx context.Context, pod *v1.Pod) {
	says := func() (there, lives bool) {
		object, there, err := cluster.pods.GetByKey(pod.Namespace + "/" + pod.Name)
		now, ok := object.(*v1.Pod)
		return err == nil && there && ok && now.UID == pod.UID && !hasEnded(now), cluster.lives(pod.Spec.NodeName)
	}
	before, lived := says()
	most := betweenReadings
	if !before {
		// It was gone by the time that its deletion was answered, or they have not heard of it yet.
		most = again
	}
	timer := time.NewTimer(most)
	defer timer.Stop()
	for {
		news := cluster.next()
		if there, lives := says(); there != before || lives != lived {
			return
		}
		select {
		case <-news:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// bound is a copy's Pod that is bound by exactly this ticket, if there is one.
func (cluster cluster) bound(ctx context.Context, binding allocation.Binding) (*v1.Pod, error) {
	pods, err := cluster.readings.read(ctx, cluster.listCopies)
	if err != nil {
		return nil, err
	}
	namespace, task := split(binding.Task)
	for at := range pods {
		pod := &pods[at]
		if pod.Namespace != namespace || pod.Labels[v1alpha1.TaskLabel] != task {
			continue
		}
		of, err := readCopy(pod)
		if err == nil && of.copy == binding.Copy && pod.Spec.NodeName == binding.Node && !hasEnded(pod) &&
			(claimOf(pod) == claim{binding.Ticket, binding.Node}) {
			return pod, nil
		}
	}
	return nil, nil
}

// lives says whether a node is heard of.
func (cluster cluster) lives(name string) bool {
	object, there, err := cluster.nodes.GetByKey(name)
	node, ok := object.(*v1.Node)
	return err == nil && there && ok && ready(node) != v1.ConditionUnknown
}
