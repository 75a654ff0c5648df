package scheduler

import (
	"fmt"
	"maps"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// singles counts Pods with R = 1 to their namespaces' quotas (S3). kube-scheduler places them, without agreement; what they have is agreed afterwards, in one
// sum for each namespace.
//
// One is let in if it needs no more than its namespace is offered. That is judged while the controller plans nothing, and what was let in is known to the controller
// when it plans: so one leading controller gives nothing twice. Whoever led before may still let some in that were on their way.
type singles struct {
	mutex sync.Mutex
	// limited are the namespaces with a quota, and what they have of Pods with R = 1; nil before the first look.
	limited map[string]allocation.Resources
	// rooms is what the leading controller leaves; without it nothing is let in.
	rooms map[string]allocation.Room
	// coming are Pods that were let in and that no look has found on a node yet; held those that were not let in. kube-scheduler has them all.
	coming map[types.UID]*v1.Pod
	held   map[types.UID]held
}

// held is a Pod that was not let in. What it was told is not for long where the leading controller had not been heard.
type held struct {
	pod     *v1.Pod
	unheard bool
}

func newSingles() singles {
	return singles{coming: map[types.UID]*v1.Pod{}, held: map[types.UID]held{}}
}

// Judge is [controller.Beside]'s.
func (singles *singles) Judge(judge func(map[string]allocation.Resources) map[string]allocation.Room) {
	singles.mutex.Lock()
	defer singles.mutex.Unlock()
	singles.rooms = judge(singles.limited)
}

// mayCome says why a Pod may not come now, if it may not.
func (singles *singles) mayCome(pod *v1.Pod) error {
	singles.mutex.Lock()
	defer singles.mutex.Unlock()
	err := singles.judge(pod)
	if err != nil {
		singles.hold(pod)
	} else {
		delete(singles.held, pod.UID)
	}
	return err
}

// hold notes a Pod that may not come: nothing but a look has kube-scheduler try it again. The mutex is held.
func (singles *singles) hold(pod *v1.Pod) {
	_, heard := singles.rooms[pod.Namespace]
	singles.held[pod.UID] = held{pod, !heard}
}

func (singles *singles) judge(pod *v1.Pod) error {
	beside, limited := singles.limited[pod.Namespace]
	if singles.limited != nil && !limited || singles.coming[pod.UID] != nil {
		return nil
	}
	room, known := singles.rooms[pod.Namespace]
	if !known {
		return fmt.Errorf("it waits for the leading controller's word on the quota of namespace '%s'", pod.Namespace)
	}
	if needs, offered := demand(pod), room.Offers(beside); !needs.Fits(offered) {
		return fmt.Errorf("it needs %v, and namespace '%s' is offered %v ('kubectl get rq')", needs, pod.Namespace, offered)
	}
	return nil
}

// take counts a Pod that has found a node.
func (singles *singles) take(pod *v1.Pod) error {
	singles.mutex.Lock()
	defer singles.mutex.Unlock()
	if err := singles.judge(pod); err != nil {
		singles.hold(pod)
		return err
	}
	beside, limited := singles.limited[pod.Namespace]
	if !limited || singles.coming[pod.UID] != nil {
		return nil
	}
	singles.coming[pod.UID] = pod
	singles.limited[pod.Namespace] = beside.Plus(demand(pod))
	return nil
}

// giveUp takes a Pod back that was counted and is not bound after all.
func (singles *singles) giveUp(pod *v1.Pod) {
	singles.mutex.Lock()
	defer singles.mutex.Unlock()
	if singles.coming[pod.UID] == nil {
		return
	}
	delete(singles.coming, pod.UID)
	if beside, limited := singles.limited[pod.Namespace]; limited {
		singles.limited[pod.Namespace] = beside.Minus(demand(pod))
	}
}

// countSingles counts anew what each limited namespace has of Pods with R = 1, and lets those be looked at again that may come now, or are to be told something else.
func (cluster cluster) countSingles(quotas map[string]v1alpha1.ReplicaQuotaSpec) (map[string]allocation.Resources, error) {
	singles := &cluster.singles
	singles.mutex.Lock()
	defer singles.mutex.Unlock()
	singles.limited = map[string]allocation.Resources{}
	counted := map[string]allocation.Resources{}
	for namespace := range quotas {
		objects, err := cluster.pods.ByIndex(byNamespace, namespace)
		if err != nil {
			return nil, err
		}
		var beside allocation.Resources
		for _, object := range objects {
			pod, ok := object.(*v1.Pod)
			// A copy on its node is counted with its task; one without a node is not there yet.
			if !ok || isAgreed(pod) || isCopy(pod) && pod.Spec.NodeName == "" {
				continue
			}
			if pod.Spec.NodeName != "" {
				delete(singles.coming, pod.UID)
			}
			if !hasEnded(pod) && (pod.Spec.NodeName != "" || singles.coming[pod.UID] != nil) {
				beside = beside.Plus(demand(pod))
			}
		}
		singles.limited[namespace], counted[namespace] = beside, beside.Bounded()
	}
	singles.forget(cluster.pods)
	open := map[string]*v1.Pod{}
	for uid, held := range singles.held {
		if _, heard := singles.rooms[held.pod.Namespace]; singles.judge(held.pod) == nil || held.unheard && heard {
			open[string(uid)] = held.pod
		}
	}
	if len(open) > 0 {
		cluster.handle.Activate(klog.Background(), open)
	}
	return counted, nil
}

// forget leaves out Pods that are no more, or have a node.
func (singles *singles) forget(pods cache.Indexer) {
	isGone := func(pod *v1.Pod) bool {
		object, there, err := pods.GetByKey(pod.Namespace + "/" + pod.Name)
		now, ok := object.(*v1.Pod)
		return err == nil && (!there || !ok || now.UID != pod.UID || now.Spec.NodeName != "")
	}
	maps.DeleteFunc(singles.coming, func(_ types.UID, pod *v1.Pod) bool { return isGone(pod) })
	maps.DeleteFunc(singles.held, func(_ types.UID, held held) bool { return isGone(held.pod) })
}
