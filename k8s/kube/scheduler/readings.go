package scheduler

import (
	"context"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// To read what is agreed in etcd of all copies costs the API server a look at every Pod that there is. So it is done no more often than somebody needs it: once
// for all who ask at the same time, and not at all while nothing has changed.

// readTime is the longest that it takes.
const readTime = 10 * time.Second

// copiesRead are copies as they were read last, and what was known then of changes.
type copiesRead struct {
	pods   []v1.Pod
	asOf   uint64
	newest uint64
}

// copies are all copies' Pods, as they are after all that is known of: changes that the informer tells of, and this entry. Only looks use it, one at a time.
func (cluster cluster) copies(ctx context.Context, newest uint64) ([]v1.Pod, error) {
	cluster.mutex.Lock()
	asOf := cluster.copyChanges
	cluster.mutex.Unlock()
	if last := cluster.read; last != nil && last.asOf == asOf && last.newest == newest {
		return last.pods, nil
	}
	pods, err := cluster.readings.read(ctx, cluster.listCopies)
	if err != nil {
		return nil, err
	}
	cluster.read = &copiesRead{pods, asOf, newest}
	return pods, nil
}

func (cluster cluster) listCopies(ctx context.Context) ([]v1.Pod, error) {
	list, err := cluster.claims.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{LabelSelector: v1alpha1.StrengthLabel})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// readings are lists of the copies' Pods, one after the other: whoever asks gets one that began after that, together with all others who wait for it. Nobody
// changes what is in them.
type readings struct {
	mutex sync.Mutex
	// next has not begun; nil if nobody waits for it.
	next *reading
	// turn is held by the one that runs.
	turn sync.Mutex
}

type reading struct {
	ended chan struct{}
	pods  []v1.Pod
	err   error
}

func (readings *readings) read(ctx context.Context, list func(context.Context) ([]v1.Pod, error)) ([]v1.Pod, error) {
	readings.mutex.Lock()
	awaited := readings.next
	if awaited == nil {
		awaited = &reading{ended: make(chan struct{})}
		readings.next = awaited
		go readings.run(awaited, list)
	}
	readings.mutex.Unlock()
	select {
	case <-awaited.ended:
		return awaited.pods, awaited.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (readings *readings) run(reading *reading, list func(context.Context) ([]v1.Pod, error)) {
	readings.turn.Lock()
	defer readings.turn.Unlock()
	readings.mutex.Lock()
	readings.next = nil
	readings.mutex.Unlock()
	ctx, end := context.WithTimeout(context.Background(), readTime)
	defer end()
	reading.pods, reading.err = list(ctx)
	close(reading.ended)
}
