// Package scheduler is TRIPOD as a plugin of kube-scheduler: each dunlin-scheduler is one of TRIPOD's controllers, and binds its own copies by the
// assignment that it reads from the shared log.
//
//   - It decides: which Pods wait (copies without an agreed place; ordinary Pods where another controller leads), and whether a bind is too late.
//   - Flow: Pods and Nodes -> [allocation] chooses and agrees -> an effect 'bind this copy there' -> the Pod enters the scheduling queue ->
//     kube-scheduler's own plugins judge that one node -> Reserve -> claims of all R copies -> the bind.
//   - Invariants: 1. no two copies of a task are on one node, whoever stood still and whoever died ([claims]). 2. a task's first copy is bound only
//     when all R are claimed. 3. a copy is bound only by an agreed place. 4. an ordinary Pod is scheduled as ever, by the leading controller.
//   - Source: TRIPOD (APSys'16), figure 5.
//   - Not here: where a copy goes (allocation), who makes the Pods, what runs in them.
package scheduler

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"sigs.k8s.io/yaml"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/controller"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/log"
)

// Name is the plugin's, in the scheduler's configuration.
const Name = "Tripod"

// Arguments are the plugin's, in the scheduler's configuration.
type Arguments struct {
	// Controller tells this one from the others; each has another one. What NODE_NAME says in the environment, if it is left out.
	Controller string `json:"controller"`
	// Log is the shared log that the controllers agree in.
	Log string `json:"log,omitempty"`
	// Sockets are the control sockets of the hosts' daemons, the own one first.
	Sockets []string `json:"sockets,omitempty"`
	// AliveMilliseconds is how often it says that it is alive, and DeadMilliseconds the silence after which a controller counts as dead.
	AliveMilliseconds int64 `json:"aliveMilliseconds,omitempty"`
	DeadMilliseconds  int64 `json:"deadMilliseconds,omitempty"`
}

// read fills in what is left out.
func read(object runtime.Object) (Arguments, allocation.Timing, error) {
	arguments, timing := Arguments{Log: "tripod", Sockets: []string{log.Socket}}, allocation.DefaultTiming
	if given, ok := object.(*runtime.Unknown); ok {
		if err := yaml.UnmarshalStrict(given.Raw, &arguments); err != nil {
			return arguments, timing, fmt.Errorf("plugin %s: args: %w", Name, err)
		}
	}
	if arguments.Controller == "" {
		arguments.Controller = os.Getenv("NODE_NAME")
	}
	if arguments.Controller == "" {
		return arguments, timing, fmt.Errorf("plugin %s: args.controller, or NODE_NAME in the environment, has to name this controller", Name)
	}
	if arguments.AliveMilliseconds != 0 || arguments.DeadMilliseconds != 0 {
		timing = allocation.Timing{
			Alive: time.Duration(arguments.AliveMilliseconds) * time.Millisecond, Dead: time.Duration(arguments.DeadMilliseconds) * time.Millisecond,
		}
	}
	if timing.Alive <= 0 || timing.Dead < 2*timing.Alive {
		return arguments, timing, fmt.Errorf("plugin %s: args.aliveMilliseconds is more than 0, and deadMilliseconds at least twice that", Name)
	}
	return arguments, timing, nil
}

// Plugin is one controller's.
type Plugin struct {
	handle framework.Handle
	claims claims
	hosts  dynamic.NamespaceableResourceInterface
	quotas dynamic.NamespaceableResourceInterface
	pods   cache.Indexer
	nodes  cache.Indexer
	say    func(string)

	mutex sync.Mutex
	// news is closed when something has changed; changes counts how often it was more than a Pod that nothing waits for, and copyChanges how often it was a copy's Pod.
	news        chan struct{}
	changes     uint64
	copyChanges uint64
	// looked is how many changes the last look has seen.
	looked uint64
	// tired is until when the next look waits; only looks use it, one at a time.
	tired time.Time
	// read are the copies that the last look has read; only looks use it.
	read     *copiesRead
	readings readings
	// wanted are the binds under way, by the Pod; allocation bounds them.
	wanted map[types.UID]*attempt
	// gated are ordinary Pods that wait for this controller to lead; the API server bounds them, and a Pod that is gone is taken out.
	gated map[types.UID]*v1.Pod
	leads bool
	// told is why its task waits, by the Pod that it was said on; only the controller's loop uses it.
	told map[types.UID]string
	// toldOf is what was told of last, and how many changes of copies' Pods there had been: without news there is nothing to tell.
	toldOf waitsAt
	// statuses are those of the ReplicaQuotas that there are, by their namespaces.
	statuses map[string]v1alpha1.ReplicaQuotaStatus
	singles  singles
	fitness  fitness
	// offered is the newest word of what namespaces are offered.
	offered chan map[string]allocation.Offer
}

// attempt is a bind under way.
type attempt struct {
	bind allocation.BindTask
	// own is the Pod as it was when it claimed.
	own *v1.Pod
	// ended gets what came of it, once; nil is success.
	ended chan error
}

func (attempt *attempt) claim() claim { return claim{attempt.bind.Ticket, attempt.bind.Node} }

// end says what came of it; what is said first counts.
func (attempt *attempt) end(err error) {
	select {
	case attempt.ended <- err:
	default:
	}
}

var (
	_ framework.PreEnqueuePlugin  = &Plugin{}
	_ framework.EnqueueExtensions = &Plugin{}
	_ framework.PreFilterPlugin   = &Plugin{}
	_ framework.FilterPlugin      = &Plugin{}
	_ framework.PostFilterPlugin  = &Plugin{}
	_ framework.ReservePlugin     = &Plugin{}
	_ framework.PreBindPlugin     = &Plugin{}
	_ framework.BindPlugin        = &Plugin{}
	_ controller.Cluster          = cluster{}
)

// New begins to run the controller; it ends with the context.
func New(ctx context.Context, object runtime.Object, handle framework.Handle) (framework.Plugin, error) {
	arguments, timing, err := read(object)
	if err != nil {
		return nil, err
	}
	resources, err := dynamic.NewForConfig(resourceConfig(handle.KubeConfig()))
	if err != nil {
		return nil, err
	}
	factory := handle.SharedInformerFactory()
	pods, nodes := factory.Core().V1().Pods().Informer(), factory.Core().V1().Nodes().Informer()
	plugin := &Plugin{
		handle: handle, claims: claims{handle.ClientSet()}, hosts: resources.Resource(v1alpha1.Version.WithResource("dunlinhosts")),
		quotas: resources.Resource(v1alpha1.Version.WithResource("replicaquotas")), offered: make(chan map[string]allocation.Offer, 1),
		pods: pods.GetIndexer(), nodes: nodes.GetIndexer(), news: make(chan struct{}),
		wanted: map[types.UID]*attempt{}, gated: map[types.UID]*v1.Pod{}, told: map[types.UID]string{}, singles: newSingles(), fitness: newFitness(),
		say: func(line string) { fmt.Printf("controller %s: %s\n", arguments.Controller, line) },
	}
	if err := pods.AddIndexers(cache.Indexers{byTask: taskOf, byNode: nodeOf, byNamespace: cache.MetaNamespaceIndexFunc}); err != nil {
		return nil, err
	}
	for _, informer := range []cache.SharedIndexInformer{pods, nodes} {
		handler := cache.ResourceEventHandlerFuncs{
			AddFunc: func(now any) { plugin.change(now) }, UpdateFunc: func(before, now any) { plugin.change(before, now) }, DeleteFunc: plugin.gone,
		}
		if _, err := informer.AddEventHandler(handler); err != nil {
			return nil, err
		}
	}
	go plugin.writeOffers(ctx)
	go func() {
		// It needs nothing of the scheduler's but these two.
		if !cache.WaitForCacheSync(ctx.Done(), pods.HasSynced, nodes.HasSynced) {
			return
		}
		err := controller.Run(ctx, controller.Config{
			Name: arguments.Controller, Log: arguments.Log, Client: log.New(arguments.Sockets...), Cluster: cluster{plugin}, Beside: &plugin.singles, Timing: timing,
			Say: plugin.say, Leads: plugin.lead, Waits: plugin.tellWaits, Offers: plugin.tellOffers,
		})
		if ctx.Err() == nil {
			// A scheduler without its controller would place nothing, and say nothing.
			fmt.Fprintln(os.Stderr, "dunlin-scheduler: "+err.Error())
			os.Exit(1)
		}
	}()
	return plugin, nil
}

const (
	byTask = "dunlin.dev/task"
	byNode = "dunlin.dev/node"
	// kube-scheduler's own informer has no index by namespace.
	byNamespace = "dunlin.dev/namespace"
)

func taskOf(object any) ([]string, error) {
	pod, ok := object.(*v1.Pod)
	if !ok || !isCopy(pod) {
		return nil, nil
	}
	return []string{pod.Namespace + "/" + pod.Labels[v1alpha1.TaskLabel]}, nil
}

func nodeOf(object any) ([]string, error) {
	pod, ok := object.(*v1.Pod)
	if !ok || pod.Spec.NodeName == "" {
		return nil, nil
	}
	return []string{pod.Spec.NodeName}, nil
}

// Name is the plugin's.
func (plugin *Plugin) Name() string { return Name }

// change tells everybody who waits. It is told what has changed, as it was and as it is.
func (plugin *Plugin) change(objects ...any) {
	plugin.mutex.Lock()
	defer plugin.mutex.Unlock()
	close(plugin.news)
	plugin.news = make(chan struct{})
	ordinary := len(objects) > 0
	for _, object := range objects {
		pod, ok := object.(*v1.Pod)
		if ok && isCopy(pod) {
			plugin.copyChanges++
			ordinary = false
			break
		}
		// An ordinary Pod in a namespace without a quota changes what its node has left, and no more: a look comes within a moment anyway.
		ordinary = ordinary && ok && !plugin.hasQuota(pod.Namespace)
	}
	if !ordinary {
		plugin.changes++
	}
}

// hasQuota says whether a namespace has one, as the last look has found. The mutex is held.
func (plugin *Plugin) hasQuota(namespace string) bool {
	_, limited := plugin.statuses[namespace]
	return limited
}

func (plugin *Plugin) gone(object any) {
	// Where the end of a Pod was missed, only its last state is known.
	if late, is := object.(cache.DeletedFinalStateUnknown); is {
		object = late.Obj
	}
	if pod, ok := object.(*v1.Pod); ok {
		plugin.mutex.Lock()
		delete(plugin.gated, pod.UID)
		plugin.mutex.Unlock()
	}
	plugin.change(object)
}

// next is closed with the next change.
func (plugin *Plugin) next() <-chan struct{} {
	plugin.mutex.Lock()
	defer plugin.mutex.Unlock()
	return plugin.news
}

// lead takes that this controller leads now, or no more.
func (plugin *Plugin) lead(leads bool) {
	plugin.mutex.Lock()
	plugin.leads = leads
	plugin.mutex.Unlock()
	plugin.change()
	plugin.openGate()
}

// waitsAt is why tasks wait, as it was after so many changes of copies' Pods.
type waitsAt struct {
	waits       map[string]error
	copyChanges uint64
}

// same says whether it is the very same: each plan makes another map.
func (at waitsAt) same(other waitsAt) bool {
	return at.copyChanges == other.copyChanges && reflect.ValueOf(at.waits).Pointer() == reflect.ValueOf(other.waits).Pointer()
}

// tellWaits says on a task's Pods why it waits, when that has changed, and on those that are new.
func (plugin *Plugin) tellWaits(waits map[string]error) {
	plugin.mutex.Lock()
	now := waitsAt{waits, plugin.copyChanges}
	plugin.mutex.Unlock()
	if now.same(plugin.toldOf) {
		return
	}
	before := plugin.told
	plugin.toldOf = now
	plugin.told = map[types.UID]string{}
	for task, why := range waits {
		for _, pod := range plugin.known(task) {
			// One on a node that is gone waits for another place, or for that node.
			if pod.Spec.NodeName != "" && (cluster{plugin}).lives(pod.Spec.NodeName) {
				continue
			}
			if plugin.told[pod.UID] = why.Error(); before[pod.UID] != why.Error() {
				plugin.handle.EventRecorder().Eventf(pod, nil, v1.EventTypeWarning, "WaitsForPlaces", "Scheduling", "the task waits: %s", why.Error())
			}
		}
	}
}

// resourceConfig is for objects of our own, which are JSON.
func resourceConfig(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.AcceptContentTypes, config.ContentType = "application/json", "application/json"
	return config
}

// openGate lets ordinary Pods go that waited for this controller to lead. One that is just on its way behind the gate goes with the next look.
func (plugin *Plugin) openGate() {
	plugin.mutex.Lock()
	open := map[string]*v1.Pod{}
	if plugin.leads {
		for uid, pod := range plugin.gated {
			open[string(uid)] = pod
		}
	}
	plugin.mutex.Unlock()
	if len(open) > 0 {
		plugin.handle.Activate(klog.Background(), open)
	}
}

// attemptFor is the bind under way of a Pod, if there is one.
func (plugin *Plugin) attemptFor(pod *v1.Pod) *attempt {
	plugin.mutex.Lock()
	defer plugin.mutex.Unlock()
	return plugin.wanted[pod.UID]
}

var (
	waitsForPlace  = "it waits for the controllers to agree on a place for it"
	waitsForLeader = "another controller leads, and schedules it"
)

// PreEnqueue keeps Pods out of the queue that are not this controller's to bind now.
func (plugin *Plugin) PreEnqueue(_ context.Context, pod *v1.Pod) *fwk.Status {
	// What is wrong with a Pod's labels is said by the leading controller, in the Pod's status: what stops here nobody is told.
	if _, err := readCopy(pod); isCopy(pod) && err == nil {
		if plugin.attemptFor(pod) == nil {
			return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, waitsForPlace)
		}
		return nil
	}
	plugin.mutex.Lock()
	defer plugin.mutex.Unlock()
	if !plugin.leads {
		plugin.gated[pod.UID] = pod
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, waitsForLeader)
	}
	delete(plugin.gated, pod.UID)
	return nil
}

// EventsToRegister are changed labels, where they were wrong; else this plugin activates Pods by itself.
func (plugin *Plugin) EventsToRegister(context.Context) ([]fwk.ClusterEventWithHint, error) {
	return []fwk.ClusterEventWithHint{{Event: fwk.ClusterEvent{Resource: fwk.Pod, ActionType: fwk.UpdatePodLabel}}}, nil
}

// PreFilter leaves a copy its one node.
func (plugin *Plugin) PreFilter(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) (*framework.PreFilterResult, *fwk.Status) {
	if !isCopy(pod) {
		if err := plugin.singles.mayCome(pod); err != nil {
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
		}
		if isOfDunlin(pod) {
			plugin.wait(pod)
			return nil, nil
		}
		return nil, fwk.NewStatus(fwk.Skip)
	}
	if _, err := readCopy(pod); err != nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	attempt := plugin.attemptFor(pod)
	if attempt == nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, waitsForPlace)
	}
	return &framework.PreFilterResult{NodeNames: sets.New(attempt.bind.Node)}, nil
}

// PreFilterExtensions are none.
func (plugin *Plugin) PreFilterExtensions() framework.PreFilterExtensions { return nil }

// PostFilter takes the word that a copy cannot go where it was to go: it is given another place by agreement, and preempts nobody.
func (plugin *Plugin) PostFilter(_ context.Context, _ fwk.CycleState, pod *v1.Pod, statuses framework.NodeToStatusReader) (*framework.PostFilterResult, *fwk.Status) {
	if !isCopy(pod) {
		return nil, fwk.NewStatus(fwk.Unschedulable)
	}
	attempt := plugin.attemptFor(pod)
	if attempt == nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, waitsForPlace)
	}
	why := strings.Join(statuses.Get(attempt.bind.Node).Reasons(), ", ")
	attempt.end(refusal{fmt.Sprintf("node '%s': %s", attempt.bind.Node, why)})
	return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "the controllers agree on another place")
}

// Reserve counts an ordinary Pod to its namespace's quota; kube-scheduler has counted it to its node.
func (plugin *Plugin) Reserve(_ context.Context, _ fwk.CycleState, pod *v1.Pod, nodeName string) *fwk.Status {
	if !isCopy(pod) {
		if err := plugin.singles.take(pod); err != nil {
			return fwk.NewStatus(fwk.Unschedulable, err.Error())
		}
		return nil
	}
	if attempt := plugin.attemptFor(pod); attempt == nil || attempt.bind.Node != nodeName {
		return fwk.NewStatus(fwk.Unschedulable, waitsForPlace)
	}
	return nil
}

var errUndone = errors.New("the scheduler has given up this try")

// Unreserve takes the word that a try came to nothing.
func (plugin *Plugin) Unreserve(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) {
	plugin.singles.giveUp(pod)
	if attempt := plugin.attemptFor(pod); attempt != nil {
		attempt.end(errUndone)
	}
}

// PreBindPreFlight says whether PreBind has something to do.
func (plugin *Plugin) PreBindPreFlight(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) *fwk.Status {
	if !isOfDunlin(pod) {
		return fwk.NewStatus(fwk.Skip)
	}
	return nil
}

// PreBind looks at the node's DunlinHost once more, claims the node, and waits until all copies of the task have claimed theirs (invariant 2). Permit would be the name for it; but what it
// calls is not for the scheduling cycle, in which all other Pods wait.
func (plugin *Plugin) PreBind(ctx context.Context, _ fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	// It may be asked whatever PreBindPreFlight says.
	if !isCopy(pod) {
		return plugin.mayGo(ctx, pod, node)
	}
	attempt := plugin.attemptFor(pod)
	if attempt == nil {
		return fwk.NewStatus(fwk.Unschedulable, waitsForPlace)
	}
	err := plugin.stillFits(ctx, pod, attempt.bind.Node)
	if err == nil {
		attempt.own, err = plugin.claims.claim(ctx, pod, attempt.claim())
	}
	if err == nil {
		err = plugin.untilAllHaveClaimed(ctx, attempt)
	}
	if err != nil {
		attempt.end(err)
		return fwk.NewStatus(fwk.Unschedulable, err.Error())
	}
	return nil
}

// Bind binds a copy; other Pods are bound as ever.
func (plugin *Plugin) Bind(ctx context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) *fwk.Status {
	if !isCopy(pod) {
		return fwk.NewStatus(fwk.Skip)
	}
	attempt := plugin.attemptFor(pod)
	if attempt == nil || attempt.own == nil {
		return fwk.NewStatus(fwk.Unschedulable, waitsForPlace)
	}
	err := plugin.claims.bind(ctx, attempt.own, attempt.claim())
	attempt.end(err)
	if err != nil {
		return fwk.AsStatus(err)
	}
	return nil
}
