package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// A copy of a ProtectedVM or a ProtectedProgram needs more of its node than a Pod can ask for: a daemon that is heard, KVM, disk. Its operator writes what into the
// Pod ([v1alpha1.Needs]), and here it is compared with what the DunlinHosts say (S1).
//
//   - With R > 1 places are chosen by what a look has found ([fitness.see]), and before a copy claims its node that one's DunlinHost is read once more.
//   - With R = 1 kube-scheduler chooses, and this is one more filter of its.
//
// Pods that say nothing of this are placed as ever.

// fitness is what the last look has found of hosts, and the Pods with R = 1 that are placed by it.
type fitness struct {
	mutex sync.Mutex
	hosts map[string]*v1alpha1.DunlinHost
	// singles are Pods with R = 1 that have no node yet, and the nodes that lacked nothing for them when they were looked at; kube-scheduler has them all.
	singles map[types.UID]single
}

type single struct {
	pod *v1.Pod
	fit string
}

func newFitness() fitness { return fitness{singles: map[types.UID]single{}} }

// hostsNow are the DunlinHosts by the nodes' names; there are none where nobody has made the resource known.
func (cluster cluster) hostsNow(ctx context.Context) (map[string]*v1alpha1.DunlinHost, error) {
	hosts := map[string]*v1alpha1.DunlinHost{}
	err := each(ctx, cluster.hosts, runtimeObject(func(host *v1alpha1.DunlinHost) { hosts[host.Name] = host }))
	return hosts, err
}

// see takes what a look has found, and lets those Pods be looked at again for which other nodes are fit now.
func (plugin *Plugin) see(hosts map[string]*v1alpha1.DunlinHost) {
	fitness := &plugin.fitness
	fitness.mutex.Lock()
	fitness.hosts = hosts
	open := map[string]*v1.Pod{}
	for uid, known := range fitness.singles {
		object, there, err := plugin.pods.GetByKey(known.pod.Namespace + "/" + known.pod.Name)
		now, ok := object.(*v1.Pod)
		if err == nil && (!there || !ok || now.UID != uid || now.Spec.NodeName != "") {
			delete(fitness.singles, uid)
		} else if fit := plugin.fitFor(known.pod); fit != known.fit {
			open[string(uid)] = known.pod
		}
	}
	fitness.mutex.Unlock()
	if len(open) > 0 {
		plugin.handle.Activate(klog.Background(), open)
	}
}

// fitFor are the hosts that lack nothing for a Pod, and what each has left for copies, if it bounds that, in one word. The mutex is held.
func (plugin *Plugin) fitFor(pod *v1.Pod) string {
	needs, _ := v1alpha1.ReadNeeds(pod.Annotations)
	var fit []string
	for name, host := range plugin.fitness.hosts {
		if needs.Lacks(host) != "" {
			continue
		}
		if most := host.Spec.MemoryMiB; most != nil {
			name = fmt.Sprintf("%s with %d MiB", name, *most-plugin.copiesOn(name).MemoryMiB)
		}
		fit = append(fit, name)
	}
	sort.Strings(fit)
	return strings.Join(fit, ", ")
}

// copiesOn is what copies have of a node, as the informer has them.
func (plugin *Plugin) copiesOn(node string) (taken allocation.Resources) {
	objects, err := plugin.pods.ByIndex(byNode, node)
	if err != nil {
		return taken
	}
	for _, object := range objects {
		if pod, ok := object.(*v1.Pod); ok && isOfDunlin(pod) && !hasEnded(pod) {
			taken = taken.Plus(demand(pod))
		}
	}
	return taken
}

// wait notes a Pod with R = 1 that is looked at.
func (plugin *Plugin) wait(pod *v1.Pod) {
	plugin.fitness.mutex.Lock()
	defer plugin.fitness.mutex.Unlock()
	plugin.fitness.singles[pod.UID] = single{pod, plugin.fitFor(pod)}
}

// Filter keeps a VM's or a program's one copy from nodes that cannot run it. Of copies with R > 1 the controllers agree on nodes that can.
func (plugin *Plugin) Filter(_ context.Context, _ fwk.CycleState, pod *v1.Pod, node fwk.NodeInfo) *fwk.Status {
	needs, said := v1alpha1.ReadNeeds(pod.Annotations)
	if !said || isCopy(pod) || node.Node() == nil {
		return nil
	}
	plugin.fitness.mutex.Lock()
	host := plugin.fitness.hosts[node.Node().Name]
	plugin.fitness.mutex.Unlock()
	if why := needs.Lacks(host); why != "" {
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, why)
	}
	if most := host.Spec.MemoryMiB; most != nil {
		taken := demand(pod)
		for _, other := range node.GetPods() {
			if isOfDunlin(other.GetPod()) {
				taken = taken.Plus(demand(other.GetPod()))
			}
		}
		if taken.MemoryMiB > *most {
			return fwk.NewStatus(fwk.Unschedulable, "its DunlinHost has no more memory for copies")
		}
	}
	return nil
}

// isOfDunlin says whether a Pod stands for a copy, whatever its R.
func isOfDunlin(pod *v1.Pod) bool {
	_, said := v1alpha1.ReadNeeds(pod.Annotations)
	return said || isCopy(pod) || pod.Labels["dunlin.dev/number"] != ""
}

// stillFits says why a Pod cannot go to a node by what its DunlinHost says at this moment: a look may be a little old.
func (plugin *Plugin) stillFits(ctx context.Context, pod *v1.Pod, node string) error {
	needs, said := v1alpha1.ReadNeeds(pod.Annotations)
	if !said {
		return nil
	}
	var host *v1alpha1.DunlinHost
	object, err := plugin.hosts.Get(ctx, node, metav1.GetOptions{})
	if err == nil {
		err = runtimeObject(func(found *v1alpha1.DunlinHost) { host = found })(*object)
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if why := needs.Lacks(host); why != "" {
		return refusal{fmt.Sprintf("node '%s': %s", node, why)}
	}
	return nil
}

// mayGo is [Plugin.stillFits] for a Pod in kube-scheduler's hands.
func (plugin *Plugin) mayGo(ctx context.Context, pod *v1.Pod, node string) *fwk.Status {
	err := plugin.stillFits(ctx, pod, node)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refusal{}):
		return fwk.NewStatus(fwk.Unschedulable, err.Error())
	}
	return fwk.AsStatus(err)
}

// wishOf is what a copy's Pod without a node asks for, if it asks for anything; so does one on a node that is gone, whose copy may go elsewhere.
func (cluster cluster) wishOf(pod *v1.Pod, of copyOf, unfit unfit) *allocation.Wish {
	needs, said := pod.Annotations[v1alpha1.NeedsAnnotation]
	if pod.Spec.NodeName != "" && cluster.lives(pod.Spec.NodeName) || pod.DeletionTimestamp != nil || !said && !names(pod) {
		return nil
	}
	wish := &allocation.Wish{Task: of.task, Copy: of.copy, Nodes: cluster.wished(pod)}
	if said {
		wish.Unfit = map[string]string{}
		for node, why := range unfit.of(needs, of.strength) {
			if slices.Contains(wish.Nodes, node) {
				wish.Unfit[node] = why
			}
		}
	}
	return wish
}

// unfit are the nodes that cannot run a task's copies, by what its Pods need that have no node. Many tasks need the same.
type unfit struct {
	hosts map[string]*v1alpha1.DunlinHost
	nodes []string
	known map[string]map[string]string
}

func (unfit unfit) of(needs string, strength int) map[string]string {
	key := fmt.Sprint(strength, needs)
	if _, known := unfit.known[key]; !known {
		read, _ := v1alpha1.ReadNeeds(map[string]string{v1alpha1.NeedsAnnotation: needs})
		unfit.known[key] = read.Lack(unfit.hosts, unfit.nodes, strength)
	}
	return unfit.known[key]
}
