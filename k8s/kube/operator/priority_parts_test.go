package operator

import (
	"context"
	"testing"

	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// taker takes whatever Pod is made.
type taker struct {
	client.Client
	made *v1.Pod
}

func (taker *taker) Create(_ context.Context, object client.Object, _ ...client.CreateOption) error {
	taker.made = object.(*v1.Pod)
	return nil
}

// A copy's Pod has the priority that the operator is told of, or none of its own.
func TestACopysPodHasItsPriority(t *testing.T) {
	for _, class := range []string{"", "dunlin-copy"} {
		taker := &taker{}
		if _, why, err := (&placer{Client: taker, class: class}).make(context.Background(), shop(), 0, nil, nil); why != "" || err != nil {
			t.Fatal(why, err)
		}
		if is := taker.made.Spec.PriorityClassName; is != class {
			t.Errorf("its class is '%s', not '%s'", is, class)
		}
	}
}
