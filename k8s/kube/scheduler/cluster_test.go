package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log"
	"dunlin.dev/log/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// cluster is a control plane with nodes on which nothing runs, three daemons with a shared log, and a scheduler beside each, which reaches the
// API server through a proxy of its own. The test does what kubelets and the Pods' owner would: it lets deleted Pods go, and makes lost copies anew.
type cluster struct {
	t          *testing.T
	plane      *lab.Plane
	hosts      *testbed.Hosts
	log        *log.Client
	client     kubernetes.Interface
	proxies    map[string]*lab.Proxy
	schedulers map[string]*testbed.Process
	wanted     map[string]*v1.Pod
	mutex      sync.Mutex
	broken     error
}

func begin(t *testing.T, nodes int) *cluster {
	cluster := beginWithoutSchedulers(t, nodes)
	cluster.start()
	return cluster
}

// start starts the daemons and the schedulers.
func (cluster *cluster) start() {
	cluster.t.Helper()
	cluster.hosts.Start(cluster.t)
	cluster.log = lab.BeginLog(cluster.t, cluster.hosts)
	for _, name := range cluster.hosts.Names {
		cluster.scheduler(name)
	}
	cluster.leader()
}

func beginWithoutSchedulers(t *testing.T, nodes int) *cluster {
	cluster := &cluster{
		t: t, plane: lab.Begin(t), hosts: testbed.OnLoopback(t), proxies: map[string]*lab.Proxy{}, schedulers: map[string]*testbed.Process{}, wanted: map[string]*v1.Pod{},
	}
	cluster.plane.Rights(t)
	client, err := kubernetes.NewForConfig(cluster.plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	cluster.client = client
	for _, name := range cluster.hosts.Names {
		cluster.proxies[name] = cluster.plane.BeginProxy(t)
	}
	for at := 0; at < nodes; at++ {
		if _, err := client.CoreV1().Nodes().Create(context.Background(), lab.Node(fmt.Sprintf("n%d", at), "", "4", "4Gi"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, end := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		cluster.guard(ctx)
	}()
	t.Cleanup(func() {
		end()
		<-ended
		if cluster.broken != nil {
			t.Error(cluster.broken)
		}
	})
	return cluster
}

// scheduler starts one, and waits until its controller has read what is agreed.
func (cluster *cluster) scheduler(name string) {
	args := lab.SchedulerArgs(name, cluster.hosts.Sockets(name))
	cluster.schedulers[name] = cluster.run(name, args)
	cluster.schedulers[name].Until(cluster.t, "has read what is agreed")
}

func (cluster *cluster) run(name, args string) *testbed.Process {
	cluster.t.Helper()
	return lab.Scheduler(cluster.t, cluster.plane.KubeconfigAs(cluster.t, "kubeconfig-"+name, cluster.proxies[name].Address, lab.SchedulerAccount), args)
}

// guard looks at every state of the Pods that there ever is, and does a kubelet's and an owner's work.
func (cluster *cluster) guard(ctx context.Context) {
	pods := cluster.client.CoreV1().Pods("default")
	stream, err := cluster.watch(ctx, pods)
	if err != nil {
		if ctx.Err() == nil {
			cluster.breaks(err)
		}
		return
	}
	now := map[string]*v1.Pod{}
	for event := range stream.ResultChan() {
		pod, ok := event.Object.(*v1.Pod)
		if !ok {
			if ctx.Err() != nil {
				return
			}
			cluster.breaks(fmt.Errorf("the watch ended: %v", event.Object))
			return
		}
		now[pod.Name] = pod
		if event.Type == watch.Deleted {
			delete(now, pod.Name)
			cluster.anew(ctx, pod.Name)
		}
		if pod.DeletionTimestamp != nil && event.Type != watch.Deleted {
			// Without a kubelet nobody lets it go.
			err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64), Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil {
				cluster.breaks(err)
			}
		}
		on := map[string]string{}
		for _, pod := range now {
			place := pod.Spec.NodeName + " has " + pod.Labels["dunlin.dev/task"]
			if pod.Spec.NodeName == "" || pod.Labels["dunlin.dev/task"] == "" {
				continue
			}
			if on[place] != "" {
				cluster.breaks(fmt.Errorf("node %s twice: %s and %s", place, on[place], pod.Name))
			}
			on[place] = pod.Name
		}
	}
	if ctx.Err() == nil {
		cluster.breaks(errors.New("the watch of the Pods ended"))
	}
}

// watch is of every state that a Pod has from now on; there is none yet. A server ends a watch whose client is slow: it goes on where it was.
func (cluster *cluster) watch(ctx context.Context, pods corev1.PodInterface) (watch.Interface, error) {
	list, err := pods.List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{WatchFuncWithContext: pods.Watch})
}

func (cluster *cluster) breaks(err error) {
	cluster.mutex.Lock()
	defer cluster.mutex.Unlock()
	if cluster.broken == nil {
		cluster.broken = err
	}
}

// anew makes a Pod again that is wanted, unless [cluster.create] has just made it.
func (cluster *cluster) anew(ctx context.Context, name string) {
	cluster.mutex.Lock()
	pod := cluster.wanted[name]
	cluster.mutex.Unlock()
	if pod != nil {
		if _, err := cluster.client.CoreV1().Pods("default").Create(ctx, pod.DeepCopy(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) && ctx.Err() == nil {
			cluster.breaks(err)
		}
	}
}

// create makes a Pod that is wanted from now on. It may be there already: whoever sees only now that an earlier one of its name is gone makes it anew.
func (cluster *cluster) create(pod *v1.Pod) {
	cluster.t.Helper()
	cluster.mutex.Lock()
	cluster.wanted[pod.Name] = pod
	cluster.mutex.Unlock()
	if _, err := cluster.client.CoreV1().Pods("default").Create(context.Background(), pod.DeepCopy(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		cluster.t.Fatal(err)
	}
}

// submit makes a task's Pods.
func (cluster *cluster) submit(task string, strength int) {
	cluster.t.Helper()
	for number := 0; number < strength; number++ {
		cluster.create(lab.Copy(task, number, strength, "1", "512Mi"))
	}
}

// end deletes a Pod that is not wanted any more.
func (cluster *cluster) end(name string) {
	cluster.t.Helper()
	cluster.mutex.Lock()
	delete(cluster.wanted, name)
	cluster.mutex.Unlock()
	cluster.forget(name)
}

// forget deletes a Pod; it is made anew if it is wanted.
func (cluster *cluster) forget(name string) {
	cluster.t.Helper()
	if err := cluster.client.CoreV1().Pods("default").Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
		cluster.t.Fatal(err)
	}
}

// pod returns one; an empty one where it is not there at the moment.
func (cluster *cluster) pod(name string) *v1.Pod {
	pod, err := cluster.client.CoreV1().Pods("default").Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		return &v1.Pod{}
	}
	return pod
}

func isBound(pod *v1.Pod) error {
	if pod.Spec.NodeName == "" {
		return fmt.Errorf("Pod '%s' is on no node: %v %v", pod.Name, pod.Annotations, pod.Status.Conditions)
	}
	return nil
}

func isOn(pod *v1.Pod, node string) error {
	if pod.Spec.NodeName != node {
		return fmt.Errorf("Pod '%s' is on node '%s', not '%s': %v", pod.Name, pod.Spec.NodeName, node, pod.Annotations)
	}
	return nil
}

func differs(pod *v1.Pod, node string) error {
	if pod.Spec.NodeName == node {
		return fmt.Errorf("Pod '%s' is still on node '%s'", pod.Name, node)
	}
	return isBound(pod)
}

func (cluster *cluster) until(what string, holds func() error) {
	cluster.t.Helper()
	testbed.Until(cluster.t, what, func() error {
		cluster.mutex.Lock()
		broken := cluster.broken
		cluster.mutex.Unlock()
		if broken != nil {
			cluster.t.Fatal(broken)
		}
		return holds()
	})
}

// settled waits until every wanted Pod is bound, and what is agreed of the tasks says the same.
func (cluster *cluster) settled() {
	cluster.t.Helper()
	cluster.until("all is bound as it is agreed", func() error {
		agreed := cluster.agreed()
		cluster.mutex.Lock()
		defer cluster.mutex.Unlock()
		for name, wanted := range cluster.wanted {
			pod := cluster.pod(name)
			if err := isBound(pod); err != nil {
				return err
			}
			if wanted.Labels["dunlin.dev/task"] == "" {
				continue
			}
			task := agreed.Tasks["default/"+wanted.Labels["dunlin.dev/task"]]
			if task == nil || fmt.Sprint(task.Strength) != wanted.Labels["dunlin.dev/strength"] {
				return fmt.Errorf("of Pod '%s' is agreed %+v", name, task)
			}
			copy := task.Copies[int(wanted.Labels["dunlin.dev/copy"][0]-'0')]
			if claim := fmt.Sprintf("%d %s", copy.Ticket, copy.Node); copy.Phase != allocation.Bound || pod.Annotations["dunlin.dev/claim"] != claim || pod.Spec.NodeName != copy.Node {
				return fmt.Errorf("Pod '%s' is on node '%s' by claim '%s', and agreed is %+v", name, pod.Spec.NodeName, pod.Annotations["dunlin.dev/claim"], copy)
			}
		}
		return nil
	})
}

// places are the Pods' nodes and identities.
func (cluster *cluster) places() map[string]string {
	places := map[string]string{}
	for name := range cluster.wanted {
		pod := cluster.pod(name)
		places[name] = fmt.Sprintf("%s on node %s", pod.UID, pod.Spec.NodeName)
	}
	return places
}

// agreed is what the log says now.
func (cluster *cluster) agreed() *allocation.State {
	cluster.t.Helper()
	return cluster.read("what is agreed", false, func(*allocation.State) bool { return false })
}

// agreedUntil waits until what was agreed was so at some time, from the log's beginning on.
func (cluster *cluster) agreedUntil(what string, is func(*allocation.State) bool) *allocation.State {
	cluster.t.Helper()
	return cluster.read(what, true, is)
}

// agreedNow waits until what is agreed is so now.
func (cluster *cluster) agreedNow(what string, is func(*allocation.State) bool) (state *allocation.State) {
	cluster.t.Helper()
	cluster.until(what, func() error {
		if state = cluster.agreed(); !is(state) {
			return fmt.Errorf("agreed is %s", state.Encode())
		}
		return nil
	})
	return state
}

// history is who has led until now, and whether a controller has counted as dead: its copies are others' then.
func (cluster *cluster) history() (led map[string]bool, died bool) {
	cluster.t.Helper()
	led = map[string]bool{}
	cluster.read("what was agreed", false, func(state *allocation.State) bool {
		if state.Office.Leader != "" {
			led[state.Office.Leader] = true
		}
		for _, lives := range state.Controllers {
			died = died || !lives
		}
		return false
	})
	return led, died
}

func (cluster *cluster) leader() string {
	cluster.t.Helper()
	// All three have said something, so that tasks with R = 3 may be placed.
	all := func(state *allocation.State) bool { return state.Office.Leader != "" && len(state.Controllers) == 3 }
	return cluster.agreedNow("all three are there and one leads", all).Office.Leader
}

// read reads the log from its beginning.
func (cluster *cluster) read(what string, follow bool, is func(*allocation.State) bool) *allocation.State {
	cluster.t.Helper()
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	enough := errors.New("enough")
	state := allocation.NewState()
	err := cluster.log.Read(ctx, lab.LogName, 1, follow, func(kept log.Entry) error {
		entry, err := allocation.Decode(kept.Data)
		if err != nil {
			return err
		}
		state.Apply(kept.Index, entry)
		if err := state.Check(); err != nil {
			return err
		}
		if is(state) {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) && (follow || err != nil) {
		cluster.t.Fatalf("%s: %v: %s", what, err, state.Encode())
	}
	return state
}

// event waits until a Pod has an event that says why its task waits.
func (cluster *cluster) event(pod, why string) {
	cluster.t.Helper()
	cluster.until("an event says why", func() error {
		events, err := cluster.client.EventsV1().Events("default").List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, event := range events.Items {
			if event.Regarding.Name == pod && event.Reason == "WaitsForPlaces" && strings.Contains(event.Note, why) {
				return nil
			}
		}
		return fmt.Errorf("there are %d events, and none of it", len(events.Items))
	})
}

// setReady says of a node what is known of it.
func (cluster *cluster) setReady(name string, ready v1.ConditionStatus) {
	cluster.t.Helper()
	node, err := cluster.client.CoreV1().Nodes().Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		cluster.t.Fatal(err)
	}
	node.Status.Conditions[0].Status = ready
	if _, err := cluster.client.CoreV1().Nodes().UpdateStatus(context.Background(), node, metav1.UpdateOptions{}); err != nil {
		cluster.t.Fatal(err)
	}
}

// bound says which schedulers' requests to this path were granted.
func (cluster *cluster) bound(path string) []string {
	var by []string
	for name, proxy := range cluster.proxies {
		for _, request := range proxy.Done() {
			if request.Path == path && request.Status == 201 {
				by = append(by, name)
			}
		}
	}
	return by
}

// hold holds such requests of all schedulers: who will lead when it matters nobody knows before.
func (cluster *cluster) hold(held func(*http.Request) bool) {
	for _, proxy := range cluster.proxies {
		proxy.Hold(held)
	}
}

// holdOnly lets the requests of all others go on.
func (cluster *cluster) holdOnly(name string) {
	for other, proxy := range cluster.proxies {
		if other != name {
			proxy.Hold(nil)
		}
	}
}

// late lets a scheduler's held requests go on, and looks that each comes to nothing.
func (cluster *cluster) late(name string) {
	cluster.t.Helper()
	waiting := cluster.proxies[name].Waiting()
	if waiting == 0 {
		cluster.t.Fatal("nothing is held")
	}
	cluster.proxies[name].Hold(nil)
	cluster.until("what was held has arrived", func() error {
		arrived := 0
		for _, request := range cluster.proxies[name].Done() {
			if request.Held {
				arrived++
				if request.Status < 400 {
					cluster.t.Errorf("%s %s was held, came late, and was granted: %d", request.Method, request.Path, request.Status)
				}
			}
		}
		if arrived < waiting {
			return fmt.Errorf("%d of %d have", arrived, waiting)
		}
		return nil
	})
}
