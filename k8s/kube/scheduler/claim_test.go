package scheduler

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"net/http"
	"os"
	"strconv"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

// step is a request of a binder that waits to be let go.
type step struct {
	binder int
	let    chan struct{}
}

// gate makes each request of a binder wait until the test lets it go.
type gate struct {
	next   http.RoundTripper
	binder int
	steps  chan<- step
}

func (gate gate) RoundTrip(in *http.Request) (*http.Response, error) {
	step := step{gate.binder, make(chan struct{})}
	gate.steps <- step
	<-step.let
	return gate.next.RoundTrip(in)
}

// bindOne is what a plugin does for a copy, without the scheduler.
func bindOne(ctx context.Context, claims claims, pod *v1.Pod, wanted claim) error {
	own, err := claims.claim(ctx, pod, wanted)
	if errors.Is(err, errThere) {
		return nil
	}
	if err != nil {
		return err
	}
	return claims.bind(ctx, own, wanted)
}

func seeds(t *testing.T, count int) []int64 {
	if text := os.Getenv("DUNLIN_SEED"); text != "" {
		seed, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return []int64{seed}
	}
	var all []int64
	for at, now := 0, time.Now().UnixNano(); at < count; at++ {
		all = append(all, now+int64(at))
	}
	return all
}

// Binders with any tickets and any nodes, each stopped for any time between any two of its requests, never bring two copies of a task onto one node.
func TestNoOrderOfRequestsBringsTwoCopiesOntoANode(t *testing.T) {
	plane := lab.Begin(t)
	client, err := kubernetes.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	way, err := rest.TransportFor(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	worlds := 150
	if testing.Short() {
		worlds = 20
	}
	bound, refused := 0, 0
	for at, seed := range seeds(t, worlds) {
		world := &world{t: t, seed: seed, plane: plane, way: way, client: client, task: fmt.Sprintf("task-%d", at), random: rand.New(rand.NewSource(seed))}
		one, other := world.play()
		bound, refused = bound+one, refused+other
	}
	t.Logf("%d binds were done, %d refused", bound, refused)
	if os.Getenv("DUNLIN_SEED") == "" && (bound < worlds || refused < worlds/2) {
		t.Errorf("%d binds were done and %d refused: too few to tell anything", bound, refused)
	}
}

type world struct {
	t      *testing.T
	seed   int64
	plane  *lab.Plane
	way    http.RoundTripper
	client kubernetes.Interface
	task   string
	random *rand.Rand
}

func (world *world) fail(format string, arguments ...any) {
	world.t.Helper()
	world.t.Fatalf("seed %d: %s\nagain with DUNLIN_SEED=%d", world.seed, fmt.Sprintf(format, arguments...), world.seed)
}

// play lets binders race, and returns how many bound their Pod and how many were refused.
func (world *world) play() (bound, refused int) {
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	copies, nodes := 2+world.random.Intn(2), 2
	var pods []*v1.Pod
	for at := 0; at < copies; at++ {
		pod := lab.Copy(world.task, at, copies, "10m", "10Mi")
		// No scheduler is to take it.
		pod.Spec.SchedulerName = "nobody"
		pod, err := world.client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
		if err != nil {
			world.fail("%v", err)
		}
		pods = append(pods, pod)
	}
	binders := 2 + world.random.Intn(4)
	steps, ended := make(chan step), make(chan error)
	for at := 0; at < binders; at++ {
		client, err := kubernetes.NewForConfigAndClient(world.plane.Config(), &http.Client{Transport: gate{world.way, at, steps}})
		if err != nil {
			world.fail("%v", err)
		}
		pod := pods[world.random.Intn(copies)]
		// Some tickets are the same: an heir goes on with what was agreed.
		wanted := claim{uint64(1 + world.random.Intn(2*binders)), fmt.Sprintf("n%d", world.random.Intn(nodes))}
		go func() { ended <- bindOne(ctx, claims{client}, pod, wanted) }()
	}
	waiting := []step{}
	for running := binders; running > 0; {
		// All that still run wait at the gate before one is chosen, so that a seed is always the same order.
		for len(waiting) < running {
			select {
			case step := <-steps:
				waiting = append(waiting, step)
			case err := <-ended:
				running--
				if err == nil {
					bound++
				} else {
					refused++
				}
			case <-ctx.Done():
				world.fail("it does not end")
			}
		}
		if running > 0 {
			waiting = world.letGo(waiting)
		}
		world.check(ctx)
	}
	for _, pod := range pods {
		if err := world.client.CoreV1().Pods("default").Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
			world.fail("%v", err)
		}
	}
	return bound, refused
}

// letGo lets one of those that wait go, in the order of their numbers, whatever the order in which they came.
func (world *world) letGo(waiting []step) []step {
	chosen := world.random.Intn(len(waiting))
	for at := range waiting {
		less := 0
		for _, other := range waiting {
			if other.binder < waiting[at].binder {
				less++
			}
		}
		if less == chosen {
			close(waiting[at].let)
			return append(waiting[:at:at], waiting[at+1:]...)
		}
	}
	return waiting
}

func (world *world) check(ctx context.Context) {
	list, err := world.client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: v1alpha1.TaskLabel + "=" + world.task})
	if err != nil {
		world.fail("%v", err)
	}
	on := map[string]string{}
	for _, pod := range list.Items {
		if node := pod.Spec.NodeName; node != "" {
			if on[node] != "" {
				world.fail("Pods '%s' and '%s' are both on node '%s'", on[node], pod.Name, node)
			}
			on[node] = pod.Name
		}
	}
}
