package scheduler

import (
	"context"
	"sort"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

const (
	// quiet is how long a look waits for news.
	quiet = time.Second
	// idle is the same where another controller leads: nothing depends on what this one sees.
	idle = 5 * time.Second
	// restOfLook is how many times as long as it took a look waits for the next one: whoever looks at thousands of Pods at each change does nothing else, nor does the
	// API server.
	restOfLook = 3
	// mostStrength is the largest R in a namespace without a quota.
	mostStrength = 3
)

// cluster is where copies run, as [controller.Cluster] says it.
type cluster struct{ *Plugin }

// Look returns what the cluster looks like, when there are news, or after a moment.
//
// Copies are read from what is agreed in etcd: what an informer has may be older than an entry that tells of a bind, and a copy that is missing there
// would be taken for one that is gone. They are not read again while neither an informer nor an entry tells of a change. Nodes and ordinary Pods may be a little old.
func (cluster cluster) Look(ctx context.Context, newest uint64) (allocation.Cluster, error) {
	cluster.openGate()
	cluster.await(ctx)
	begun := time.Now()
	defer func() { cluster.tired = time.Now().Add(min(restOfLook*time.Since(begun), quiet)) }()
	list, err := cluster.copies(ctx, newest)
	if err != nil {
		return allocation.Cluster{}, err
	}
	hosts, err := cluster.hostsNow(ctx)
	if err != nil {
		return allocation.Cluster{}, err
	}
	cluster.see(hosts)
	nodes, whole := cluster.look(hosts)
	seen := allocation.Cluster{Nodes: nodes, Unfit: map[string]map[string]string{}}
	unfit := unfit{hosts: hosts, known: map[string]map[string]string{}}
	for _, node := range nodes {
		unfit.nodes = append(unfit.nodes, node.Name)
	}
	quotas, err := cluster.readQuotas(ctx)
	if err != nil {
		return allocation.Cluster{}, err
	}
	tasks, applications := map[string]*task{}, map[string]bool{}
	for namespace := range quotas {
		applications[namespace] = true
	}
	for at := range list {
		pod := &list[at]
		of, err := readCopy(pod)
		if err != nil || !isCopy(pod) || hasEnded(pod) {
			continue
		}
		if tasks[of.task] == nil {
			tasks[of.task] = &task{since: pod.CreationTimestamp, first: of.copy, strength: of.strength, copies: map[int]bool{}}
		}
		tasks[of.task].add(pod, of)
		applications[pod.Namespace] = true
		if known := claimOf(pod); pod.Spec.NodeName != "" && known.node == pod.Spec.NodeName {
			seen.Bound = append(seen.Bound, allocation.Binding{Task: of.task, Copy: of.copy, Node: known.node, Ticket: known.ticket})
		}
		if wish := cluster.wishOf(pod, of, unfit); wish != nil {
			seen.Wishes = append(seen.Wishes, *wish)
		}
	}
	for name, task := range tasks {
		if task.wanted() {
			namespace, _ := split(name)
			if task.needs != "" {
				seen.Unfit[name] = unfit.of(task.needs, task.strength)
			}
			seen.Tasks = append(seen.Tasks, allocation.Task{Name: name, Application: namespace, Strength: task.strength, Demand: task.demand})
		}
	}
	sort.Slice(seen.Tasks, func(i, j int) bool {
		one, other := tasks[seen.Tasks[i].Name].since, tasks[seen.Tasks[j].Name].since
		return one.Before(&other) || one.Equal(&other) && seen.Tasks[i].Name < seen.Tasks[j].Name
	})
	beside, err := cluster.countSingles(quotas)
	if err != nil {
		return allocation.Cluster{}, err
	}
	for name := range applications {
		application := allocation.Application{Name: name, Quota: whole, MostStrength: mostStrength}
		if quota, there := quotas[name]; there {
			application.Quota, application.MostStrength, application.Beside = quotaOf(whole, quota), quota.MostStrength, beside[name]
		}
		seen.Applications = append(seen.Applications, application)
	}
	sort.Slice(seen.Applications, func(i, j int) bool { return seen.Applications[i].Name < seen.Applications[j].Name })
	return seen, nil
}

// await waits for something that the last look has not seen, for a moment.
func (cluster cluster) await(ctx context.Context) {
	begun := time.Now()
	select {
	case <-time.After(time.Until(cluster.tired)):
	case <-ctx.Done():
	}
	for {
		cluster.mutex.Lock()
		news, leads, wait := cluster.news, cluster.leads, idle
		if leads {
			wait = quiet
		}
		wait -= time.Since(begun)
		if leads && cluster.changes != cluster.looked || wait <= 0 || ctx.Err() != nil {
			cluster.looked = cluster.changes
			cluster.mutex.Unlock()
			return
		}
		cluster.mutex.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
		case <-news:
		}
		timer.Stop()
	}
}

// task is what Pods say of one.
type task struct {
	since metav1.Time
	// strength is R by the first copy's Pod. Where that gets another one while the task is placed, the others' labels follow.
	first    int
	strength int
	copies   map[int]bool
	demand   allocation.Resources
	// needs are what its copies need beside that, as one of its Pods says; nothing if they say nothing. What becomes of a lost copy its own new Pod says.
	needs  string
	placed bool
	unlike bool
}

func (task *task) add(pod *v1.Pod, of copyOf) {
	if pod.CreationTimestamp.Before(&task.since) {
		task.since = pod.CreationTimestamp
	}
	task.unlike = task.unlike || of.strength != task.strength
	if of.copy < task.first {
		task.first, task.strength = of.copy, of.strength
	}
	task.demand = most(task.demand, demand(pod))
	if pod.DeletionTimestamp == nil {
		task.copies[of.copy] = true
		task.placed = task.placed || pod.Spec.NodeName != ""
		if needs := pod.Annotations[v1alpha1.NeedsAnnotation]; needs != "" {
			task.needs = needs
		}
	}
}

// wanted says whether a task is to be placed, or stay so: all its Pods are there, or some are placed and the others are being made anew.
func (task *task) wanted() bool {
	return task.placed || !task.unlike && len(task.copies) == task.strength
}

// look returns the nodes that are alive, and what copies may take there: what ordinary Pods leave. The whole is what copies might take if there were none of
// those: it does not change whenever one comes or goes, so that what a namespace without a quota may have does not either.
func (cluster cluster) look(hosts map[string]*v1alpha1.DunlinHost) (nodes []allocation.Node, whole allocation.Resources) {
	for _, object := range cluster.nodes.List() {
		node, ok := object.(*v1.Node)
		if !ok || ready(node) == v1.ConditionUnknown {
			continue
		}
		var limit v1alpha1.DunlinHostSpec
		if host := hosts[node.Name]; host != nil {
			limit = host.Spec
		}
		all := amounts(node.Status.Allocatable, false)
		room, alone := all, allocation.Resources{}
		pods, err := cluster.pods.ByIndex(byNode, node.Name)
		if err != nil {
			continue
		}
		for _, object := range pods {
			if pod, ok := object.(*v1.Pod); ok && !isAgreed(pod) && !hasEnded(pod) {
				room = room.Minus(demand(pod))
				if isOfDunlin(pod) {
					alone = alone.Plus(demand(pod))
				}
			}
		}
		// A copy with R = 1 takes of what copies may take, too.
		room, all = room.Within(within(all, limit).Minus(alone)), within(all, limit)
		if ready(node) != v1.ConditionTrue || node.Spec.Unschedulable || keepsOut(node) || limit.Copies != nil && !*limit.Copies {
			// What is there stays; nothing comes.
			room, all = allocation.Resources{}, allocation.Resources{}
		}
		whole = whole.Plus(most(all, allocation.Resources{}))
		nodes = append(nodes, allocation.Node{Name: node.Name, Zone: node.Labels[v1.LabelTopologyZone], Capacity: most(room, allocation.Resources{})})
	}
	sort.Slice(nodes, func(i, j int) bool { return nodes[i].Name < nodes[j].Name })
	return nodes, whole
}

// names says whether a Pod asks for certain nodes.
func names(pod *v1.Pod) bool {
	return len(pod.Spec.NodeSelector) > 0 || pod.Spec.Affinity != nil && pod.Spec.Affinity.NodeAffinity != nil &&
		pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil
}

// wished are the nodes that a Pod asks for.
func (cluster cluster) wished(pod *v1.Pod) []string {
	wish, nodes := nodeaffinity.GetRequiredNodeAffinity(pod), []string{}
	for _, object := range cluster.nodes.List() {
		if node, ok := object.(*v1.Node); ok {
			if may, err := wish.Match(node); err == nil && may {
				nodes = append(nodes, node.Name)
			}
		}
	}
	return nodes
}

// keepsOut says whether a node has a taint that lets nothing new in. A Pod that tolerates it does not go there either: a task's copies are alike to the
// controllers.
func keepsOut(node *v1.Node) bool {
	for _, taint := range node.Spec.Taints {
		if taint.Effect == v1.TaintEffectNoSchedule || taint.Effect == v1.TaintEffectNoExecute {
			return true
		}
	}
	return false
}

// ready is what is known of a node: unknown is one of which nobody has heard for long, and it counts as dead.
func ready(node *v1.Node) v1.ConditionStatus {
	for _, condition := range node.Status.Conditions {
		if condition.Type == v1.NodeReady {
			return condition.Status
		}
	}
	return v1.ConditionUnknown
}
