package operator

import (
	"context"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// busy is a cluster in which somebody else changes the object in so many moments.
type busy struct {
	client.Client
	times *int
}

func (busy busy) Status() client.SubResourceWriter { return conflicts{times: busy.times} }

type conflicts struct {
	client.SubResourceWriter
	times *int
}

func (conflicts conflicts) Patch(context.Context, client.Object, client.Patch, ...client.SubResourcePatchOption) error {
	if *conflicts.times--; *conflicts.times >= 0 {
		return apierrors.NewConflict(schema.GroupResource{}, "shop", nil)
	}
	return nil
}

// A refusal that meets somebody else's word is said as soon as the object is looked at again, once, and the daemon or the node's files are not asked for that.
func TestARefusalIsSaidWhoeverWritesMeanwhile(t *testing.T) {
	times, events := 2, record.NewFakeRecorder(8)
	fresh := shop()
	fresh.Spec.VM.Kernel = "/elsewhere/k"
	host := &host{Client: busy{times: &times}, live: inEtcd{vm: fresh}, name: "a", limits: limits, events: events}
	for try := range 4 {
		vm := fresh.DeepCopy()
		result, err := settle(host.start(context.Background(), vm))
		if err != nil {
			t.Fatal(err)
		}
		if try < 2 {
			if result.RequeueAfter != soon || len(events.Events) > 0 {
				t.Errorf("try %d: again in %v, %d events", try, result.RequeueAfter, len(events.Events))
			}
			continue
		}
		said := meta.FindStatusCondition(vm.Status.Conditions, Running)
		if result.RequeueAfter <= soon || said == nil || said.Reason != "NotAllowed" || len(events.Events) != 1 {
			t.Errorf("try %d: again in %v, %+v, %d events", try, result.RequeueAfter, said, len(events.Events))
		}
		fresh = vm
	}
}
