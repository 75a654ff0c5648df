package operator

import (
	"context"
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// inEtcd is what etcd has of one VM.
type inEtcd struct {
	client.Reader
	vm *v1alpha1.ProtectedVM
}

func (in inEtcd) Get(_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	if in.vm == nil {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}
	in.vm.DeepCopyInto(object.(*v1alpha1.ProtectedVM))
	return nil
}

// What this host knows of a VM that it is to start may be old: it is read once more before the daemon is told.
func TestAVMIsReadOnceMoreBeforeItIsStarted(t *testing.T) {
	for what, one := range map[string]struct {
		edit func(*v1alpha1.ProtectedVM) *v1alpha1.ProtectedVM
		is   bool
	}{
		"the same":        {func(vm *v1alpha1.ProtectedVM) *v1alpha1.ProtectedVM { return vm }, true},
		"gone":            {func(*v1alpha1.ProtectedVM) *v1alpha1.ProtectedVM { return nil }, false},
		"being deleted":   {func(vm *v1alpha1.ProtectedVM) *v1alpha1.ProtectedVM { vm.DeletionTimestamp = &metav1.Time{}; return vm }, false},
		"another object":  {func(vm *v1alpha1.ProtectedVM) *v1alpha1.ProtectedVM { vm.UID = "1" + vm.UID[1:]; return vm }, false},
		"started":         {func(vm *v1alpha1.ProtectedVM) *v1alpha1.ProtectedVM { vm.Status.Started = &metav1.Time{}; return vm }, false},
		"on other hosts":  {func(vm *v1alpha1.ProtectedVM) *v1alpha1.ProtectedVM { vm.Status.Placement.Members[1] = "d"; return vm }, false},
		"without a place": {func(vm *v1alpha1.ProtectedVM) *v1alpha1.ProtectedVM { vm.Status.Placement = nil; return vm }, false},
	} {
		host := &host{live: inEtcd{vm: one.edit(shop())}, name: "a", limits: limits}
		if text, err := host.fileNow(context.Background(), shop()); err != nil || (text != "") != one.is {
			t.Errorf("%s: %v, '%s'", what, err, text)
		}
	}
}

// A guest has its time from when this operator sees the deletion, whatever the API server's clock says.
func TestAGuestsTimeIsByOneClock(t *testing.T) {
	host, begun := &host{grace: time.Minute}, time.Now()
	for after, want := range map[time.Duration]time.Duration{0: time.Minute, 20 * time.Second: 40 * time.Second, 2 * time.Minute: -time.Minute} {
		host.graceLeft("shop", begun)
		if left := host.graceLeft("shop", begun.Add(after)); left != want {
			t.Errorf("%v after its deletion it has %v", after, left)
		}
	}
	host.forgetAll("shop")
	if left := host.graceLeft("shop", begun.Add(time.Hour)); left != time.Minute {
		t.Errorf("another one of that name has %v", left)
	}
}

// accepts takes whatever is written into a status.
type accepts struct{ client.Client }

func (accepts) Status() client.SubResourceWriter { return written{} }

// What an administrator does not allow is looked at again after a minute, and told of once: the node's files change without a word.
func TestWhatIsNotAllowedIsLookedAtAgain(t *testing.T) {
	vm, events := shop(), record.NewFakeRecorder(8)
	vm.Spec.VM.Kernel = "/elsewhere/k"
	host := &host{Client: accepts{}, live: inEtcd{vm: vm}, name: "a", limits: limits, events: events}
	for try := 0; try < 3; try++ {
		if result, err := host.start(context.Background(), vm); err != nil || result.RequeueAfter <= 0 || result.RequeueAfter > muchLater {
			t.Errorf("%v, %v", result, err)
		}
	}
	host.notStarted = nil
	if result, err := host.start(context.Background(), vm); err != nil || result.RequeueAfter != muchLater || len(events.Events) != 1 {
		t.Errorf("%v, %v, %d events", result, err, len(events.Events))
	}
}

// asksNobody is etcd, which is not to be asked.
type asksNobody struct{ client.Reader }

func (asksNobody) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("etcd is asked")
}

// cached is a cache that has one VM.
type cached struct {
	client.Client
	of inEtcd
}

func (cached cached) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	return cached.of.Get(ctx, key, object, options...)
}

// What the cache has is there; what it has not, or has as another one, etcd is asked for.
func TestEtcdIsAskedForWhatACacheHasNot(t *testing.T) {
	mine := memory{HostVM: v1alpha1.HostVM{VM: NameOnHosts(shop()), Kind: "ProtectedVM", Namespace: "shops", Name: "shop"}}
	other := shop()
	other.UID = "1" + other.UID[1:]
	for what, one := range map[string]struct {
		cache *v1alpha1.ProtectedVM
		live  client.Reader
		is    bool
		fails bool
	}{
		"the cache has it":           {shop(), asksNobody{}, true, false},
		"the cache is behind":        {nil, inEtcd{vm: shop()}, true, false},
		"it is gone":                 {nil, inEtcd{}, false, false},
		"the cache has one of then":  {other, inEtcd{vm: shop()}, true, false},
		"another one has its name":   {other, inEtcd{vm: other}, false, false},
		"etcd does not answer":       {nil, asksNobody{}, false, true},
		"the cache is ahead of that": {shop(), inEtcd{}, true, false},
	} {
		host := &host{Client: cached{of: inEtcd{vm: one.cache}}, live: one.live, name: "a"}
		if object, err := host.find(context.Background(), vms, mine); (object != nil) != one.is || (err != nil) != one.fails {
			t.Errorf("%s: %v, %v", what, object, err)
		}
	}
}
