package scheduler

import (
	"context"
	"fmt"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// Whoever asks gets what was read after that, and many who ask at once share it.
func TestWhoeverReadsGetsWhatWasReadAfterwards(t *testing.T) {
	var readings readings
	var mutex sync.Mutex
	now, lists := 0, 0
	list := func(context.Context) ([]v1.Pod, error) {
		mutex.Lock()
		defer mutex.Unlock()
		lists++
		return make([]v1.Pod, now), nil
	}
	var readers sync.WaitGroup
	failed := make(chan error, 1)
	for reader := 0; reader < 32; reader++ {
		readers.Add(1)
		go func() {
			defer readers.Done()
			for round := 0; round < 200; round++ {
				mutex.Lock()
				now++
				wrote := now
				mutex.Unlock()
				pods, err := readings.read(context.Background(), list)
				if err != nil || len(pods) < wrote {
					select {
					case failed <- fmt.Errorf("%d of %d, %w", len(pods), wrote, err):
					default:
					}
					return
				}
			}
		}()
	}
	readers.Wait()
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
	if lists >= 32*200 {
		t.Errorf("%d lists for as many readers: nothing is shared", lists)
	}
	// Who waits no longer is let go.
	ctx, end := context.WithCancel(context.Background())
	end()
	blocked := make(chan struct{})
	defer close(blocked)
	if _, err := readings.read(ctx, func(context.Context) ([]v1.Pod, error) { <-blocked; return nil, nil }); err == nil {
		t.Error("it is read whoever is gone")
	}
}
