package scale_test

import (
	"context"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

// clients are how many requests are under way at once where objects are made.
const clients = 16

// course is a control plane with nodes, on which one scheduler after the other binds Pods. Each time the cluster is empty at first.
type course struct {
	*testing.T
	plane  *lab.Plane
	hosts  *testbed.Hosts
	client kubernetes.Interface
	mutex  sync.Mutex
	// bound is when each Pod that there is was first seen on a node.
	bound map[types.UID]time.Time
	// last is when the last of them was.
	last time.Time
	// news has room for one word that a Pod was bound.
	news chan struct{}
	// together are tasks that had two copies on one node.
	together []string
	places   map[string]string
}

func begin(t *testing.T, nodes int) *course {
	course := &course{
		T: t, plane: lab.Begin(t), hosts: testbed.OnLoopback(t), bound: map[types.UID]time.Time{}, news: make(chan struct{}, 1), places: map[string]string{},
	}
	course.plane.Install(t)
	client, err := kubernetes.NewForConfig(course.plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	course.client = client
	course.all(nodes, func(ctx context.Context, at int) error {
		node := lab.Node(fmt.Sprintf("n%d", at), fmt.Sprintf("zone-%d", at%3), "4", "8Gi")
		_, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
		return err
	})
	ctx, end := context.WithCancel(context.Background())
	t.Cleanup(end)
	// A watch that falls behind is ended by the server, and the informer begins another one.
	factory := informers.NewSharedInformerFactory(client, 0)
	informer := factory.Core().V1().Pods().Informer()
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc: course.see, UpdateFunc: func(_, now any) { course.see(now) }, DeleteFunc: course.forget,
	}
	if _, err := informer.AddEventHandler(handler); err != nil {
		t.Fatal(err)
	}
	factory.Start(ctx.Done())
	synced, end := patient(ctx)
	defer end()
	if !cache.WaitForCacheSync(synced.Done(), informer.HasSynced) {
		t.Fatal("the Pods cannot be watched")
	}
	return course
}

// placeOf is a task's place on a node; none where the Pod is no copy.
func placeOf(pod *v1.Pod) string {
	if task := pod.Labels["dunlin.dev/task"]; task != "" {
		return task + " on " + pod.Spec.NodeName
	}
	return ""
}

// see notes a Pod that is on a node.
func (course *course) see(object any) {
	pod, is := object.(*v1.Pod)
	if !is || pod.Spec.NodeName == "" {
		return
	}
	course.mutex.Lock()
	defer course.mutex.Unlock()
	if _, known := course.bound[pod.UID]; known {
		return
	}
	course.last = time.Now()
	course.bound[pod.UID] = course.last
	if place := placeOf(pod); place != "" {
		if other := course.places[place]; other != "" {
			course.together = append(course.together, fmt.Sprintf("%s: %s and %s", place, other, pod.Name))
		}
		course.places[place] = pod.Name
	}
	select {
	case course.news <- struct{}{}:
	default:
	}
}

// forget takes a Pod's place back.
func (course *course) forget(object any) {
	if late, is := object.(cache.DeletedFinalStateUnknown); is {
		object = late.Obj
	}
	if pod, is := object.(*v1.Pod); is {
		course.mutex.Lock()
		defer course.mutex.Unlock()
		delete(course.places, placeOf(pod))
		delete(course.bound, pod.UID)
	}
}

// apart says whether copies of one task were ever on one node.
func (course *course) apart() {
	course.Helper()
	course.mutex.Lock()
	defer course.mutex.Unlock()
	if len(course.together) > 0 {
		course.Errorf("copies are together: %v", course.together)
	}
}

// all does something so many times, some of them at once.
func (course *course) all(times int, do func(context.Context, int) error) {
	course.Helper()
	turns, failed := make(chan int), make(chan error, clients)
	var workers sync.WaitGroup
	for worker := 0; worker < clients; worker++ {
		workers.Add(1)
		go func() {
			defer workers.Done()
			var first error
			for turn := range turns {
				ctx, end := patient(context.Background())
				if err := do(ctx, turn); err != nil && first == nil {
					first = err
				}
				end()
			}
			failed <- first
		}()
	}
	for turn := 0; turn < times; turn++ {
		turns <- turn
	}
	close(turns)
	workers.Wait()
	close(failed)
	for err := range failed {
		if err != nil {
			course.Fatal(err)
		}
	}
}

// processes are those whose CPU time is told, by what they are.
type processes map[string][]int

// row is what one scheduler did.
type row struct {
	what string
	// took is from the first Pod's making to the last one's bind.
	took time.Duration
	// waits are from each Pod's making to its bind, in order.
	waits []time.Duration
	// cpu is in seconds.
	cpu map[string]float64
}

func (row row) String() string {
	return fmt.Sprintf("%s: %d Pods in %.1f s, %.1f a second, p50 %.2f s, p99 %.2f s, CPU seconds: server and etcd %.1f, schedulers %.1f, daemons %.1f, client %.1f", row.what,
		len(row.waits), row.took.Seconds(), row.rate(), row.wait(0.50).Seconds(), row.wait(0.99).Seconds(), row.cpu["plane"], row.cpu["schedulers"], row.cpu["daemons"], row.cpu["client"])
}

func (row row) rate() float64 { return float64(len(row.waits)) / row.took.Seconds() }

func (row row) wait(share float64) time.Duration {
	return row.waits[min(int(share*float64(len(row.waits))), len(row.waits)-1)]
}

// run makes Pods as fast as the server takes them, and waits until all are bound.
func (course *course) run(what string, of processes, pods []*v1.Pod) row {
	course.Helper()
	measured := processes{"plane": nil, "client": {os.Getpid()}}
	for _, process := range course.plane.Processes() {
		measured["plane"] = append(measured["plane"], process.Pid())
	}
	for name, pids := range of {
		measured[name] = pids
	}
	before := course.cpu(measured)
	made, ids := make([]time.Time, len(pods)), make([]types.UID, len(pods))
	begun := time.Now()
	course.all(len(pods), func(ctx context.Context, at int) error {
		made[at] = time.Now()
		there, err := course.client.CoreV1().Pods("default").Create(ctx, pods[at], metav1.CreateOptions{})
		if err == nil {
			ids[at] = there.UID
		}
		return err
	})
	last := course.allBound(what, pods)
	after := course.cpu(measured)
	row := row{what: what, took: last.Sub(begun), cpu: map[string]float64{}}
	for name := range measured {
		row.cpu[name] = after[name] - before[name]
	}
	course.mutex.Lock()
	for at, id := range ids {
		row.waits = append(row.waits, course.bound[id].Sub(made[at]))
	}
	course.mutex.Unlock()
	sort.Slice(row.waits, func(i, j int) bool { return row.waits[i] < row.waits[j] })
	course.Log(row)
	return row
}

// allBound returns when the last of them was seen on a node. It ends when none is bound for too long.
func (course *course) allBound(what string, pods []*v1.Pod) time.Time {
	course.Helper()
	late := time.NewTimer(testbed.Patience)
	defer late.Stop()
	for {
		course.mutex.Lock()
		bound, last := len(course.bound), course.last
		course.mutex.Unlock()
		if bound == len(pods) {
			return last
		}
		select {
		case <-course.news:
			late.Reset(testbed.Patience)
		case <-late.C:
			course.Fatalf("%s: %d of %d Pods are bound, and no further one is", what, bound, len(pods))
		}
	}
}

// empty lets all Pods go, as nobody else does it here: the server deletes a collection one by one.
func (course *course) empty(pods []*v1.Pod) {
	course.Helper()
	var now int64
	there := course.client.CoreV1().Pods("default")
	course.all(len(pods), func(ctx context.Context, at int) error {
		err := there.Delete(ctx, pods[at].Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
	testbed.Until(course.T, "the cluster is empty", func() error {
		ctx, end := patient(context.Background())
		defer end()
		left, err := there.List(ctx, metav1.ListOptions{Limit: 1})
		if err != nil {
			return err
		}
		course.mutex.Lock()
		defer course.mutex.Unlock()
		if len(left.Items)+len(course.bound) > 0 {
			return fmt.Errorf("Pods are left")
		}
		return nil
	})
}

// cpu is what processes have used of the processors, in seconds.
func (course *course) cpu(of processes) map[string]float64 {
	course.Helper()
	const ticks = 100 // a second, on every Linux for which Go is built
	used := map[string]float64{}
	for name, pids := range of {
		for _, pid := range pids {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err != nil {
				course.Fatal(err)
			}
			// The name may have blanks, and ends with the last bracket.
			fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
			for _, field := range fields[11:13] {
				number, err := strconv.ParseFloat(field, 64)
				if err != nil {
					course.Fatal(err)
				}
				used[name] += number / ticks
			}
		}
	}
	return used
}
