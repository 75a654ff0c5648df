// Package operator carries out ProtectedVMs and ProtectedPrograms: one operator beside each daemon of Dunlin's.
//
// It decides which hosts a VM or a program has at first, which of its parts go to other hosts (away, standby), and when a deleted object may go (placer), what its own
// daemon is asked (host, move), and which hosts count as there (report, silence). What is not the same of both is in kinds, and their files in file. Flow: an object -> Pods that stand for its copies, placed by dunlin-scheduler -> hosts -> 'up' -> what the daemons say becomes
// status, conditions and events -> deletion: 'down', and nothing is left.
//
// One of the operators is elected, and does what is to be done once; each one does what is to be done on its own host.
// Not here: what a right object is (crds), who may make one (deploy), where copies go (scheduler), and how either is kept alive (the daemons).
package operator

import (
	"context"
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// Name is the operator's, as events name it.
const Name = "dunlin-operator"

// Options are an operator's.
type Options struct {
	// Node is the Kubernetes node it is on, and its daemon's host: they have the same name.
	Node string
	// Socket is the daemon's.
	Socket string
	Limits Limits
	// Namespace has the lease by which one is elected.
	Namespace string
	// Image is what the Pods that stand for copies run.
	Image string
	// PriorityClass is theirs; nothing if they have none of their own.
	PriorityClass string
	// Metrics is where they are served, as HOST:PORT; "0" is nowhere.
	Metrics string
	// Beat is how often the host says that it is there; after four beats of silence it counts as silent.
	Beat time.Duration
	// LostAfter is how long nothing may be heard of a host before its parts go to other hosts.
	LostAfter time.Duration
	// Grace is how long a guest may take to switch itself off when its object is deleted.
	Grace time.Duration
}

// beatsOfSilence make a host silent.
const beatsOfSilence = 4

// Run runs an operator until the context ends.
func Run(ctx context.Context, config *rest.Config, options Options) error {
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return err
	}
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return err
	}
	ours, err := labels.NewRequirement(NumberLabel, selection.Exists, nil)
	if err != nil {
		return err
	}
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                        scheme,
		Cache:                         cache.Options{ByObject: map[client.Object]cache.ByObject{&v1.Pod{}: {Label: labels.NewSelector().Add(*ours)}}},
		Metrics:                       metricsserver.Options{BindAddress: options.Metrics},
		LeaderElection:                true,
		LeaderElectionID:              Name,
		LeaderElectionNamespace:       options.Namespace,
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return err
	}
	index := func(object client.Object) []string { return []string{NameOnHosts(object.(v1alpha1.Protected))} }
	for _, kind := range kinds {
		if err := manager.GetFieldIndexer().IndexField(ctx, kind.empty(), byNameOnHosts, index); err != nil {
			return err
		}
	}
	if err := beElected(manager, options); err != nil {
		return err
	}
	if err := beBeside(manager, options); err != nil {
		return err
	}
	return manager.Start(ctx)
}

// beElected adds what the elected operator does.
func beElected(manager ctrl.Manager, options Options) error {
	placer := &placer{
		Client: manager.GetClient(), live: manager.GetAPIReader(), events: manager.GetEventRecorderFor(Name), image: options.Image, class: options.PriorityClass,
		patience: &patience{after: options.LostAfter, since: map[string]time.Time{}}, refusals: newRefusals(),
	}
	// A host that came or went, for Kubernetes or for another host, or that may have copies now; not each of its beats.
	turned := predicate.Funcs{UpdateFunc: func(update event.UpdateEvent) bool {
		before, now := update.ObjectOld.(*v1alpha1.DunlinHost), update.ObjectNew.(*v1alpha1.DunlinHost)
		return isHeard(before) != isHeard(now) || before.Generation != now.Generation || !slices.Equal(before.Status.Links, now.Status.Links) ||
			before.Status.KVM != now.Status.KVM || !slices.Equal(before.Status.Data, now.Status.Data)
	}}
	for _, kind := range kinds {
		err := ctrl.NewControllerManagedBy(manager).Named("place-"+kind.word).For(kind.empty()).Owns(&v1.Pod{}).
			Watches(&v1alpha1.DunlinHost{}, handler.EnqueueRequestsFromMapFunc(kind.every(manager.GetClient())), builder.WithPredicates(turned)).
			Watches(&v1.Node{}, handler.EnqueueRequestsFromMapFunc(kind.every(manager.GetClient())), builder.WithPredicates(cordoned())).
			Complete(kind.each(manager.GetClient(), placer.turn))
		if err != nil {
			return err
		}
	}
	silence := &silence{Client: manager.GetClient(), after: beatsOfSilence * options.Beat, last: map[string]word{}}
	return ctrl.NewControllerManagedBy(manager).Named("silence").For(&v1alpha1.DunlinHost{}).Complete(silence)
}

// beBeside adds what every operator does beside its daemon.
func beBeside(manager ctrl.Manager, options Options) error {
	daemon, events := control.New(options.Socket), manager.GetEventRecorderFor(Name)
	report := &report{
		api: manager.GetClient(), live: manager.GetAPIReader(), name: options.Node, daemon: daemon, images: options.Limits.Images,
		vms: map[string]v1alpha1.HostVM{}, times: map[string]int{},
	}
	host := &host{
		Client: manager.GetClient(), live: manager.GetAPIReader(), name: options.Node, daemon: daemon, report: report, events: events, limits: options.Limits, grace: options.Grace,
		asked: map[string]uint64{}, orders: map[string]told{},
	}
	follower := &follower{
		Client: manager.GetClient(), name: options.Node, daemon: daemon, report: report, host: host, events: events,
		changed: map[*kind]chan event.GenericEvent{}, beat: options.Beat,
	}
	everyone, several := false, 4
	own := predicate.NewPredicateFuncs(func(node client.Object) bool { return node.GetName() == options.Node })
	for _, kind := range kinds {
		follower.changed[kind] = make(chan event.GenericEvent)
		err := ctrl.NewControllerManagedBy(manager).Named("host-"+kind.word).For(kind.empty()).Owns(&v1.Pod{}).
			Watches(&v1.Node{}, handler.EnqueueRequestsFromMapFunc(kind.every(manager.GetClient())), builder.WithPredicates(own, cordoned())).
			WatchesRawSource(source.Channel(follower.changed[kind], &handler.EnqueueRequestForObject{})).
			WithOptions(controller.Options{NeedLeaderElection: &everyone, MaxConcurrentReconciles: several}).
			Complete(kind.each(manager.GetClient(), host.look))
		if err != nil {
			return err
		}
	}
	return manager.Add(follower)
}

// cordoned passes a node that was cordoned, or is not any more.
func cordoned() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(update event.UpdateEvent) bool {
		return update.ObjectOld.(*v1.Node).Spec.Unschedulable != update.ObjectNew.(*v1.Node).Spec.Unschedulable
	}}
}

// every object of a kind is looked at for something that is about none of them.
func (kind *kind) every(reader client.Reader) handler.MapFunc {
	return func(ctx context.Context, _ client.Object) []reconcile.Request {
		objects, err := kind.all(ctx, reader)
		if err != nil {
			return nil
		}
		var all []reconcile.Request
		for _, object := range objects {
			all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(object)})
		}
		return all
	}
}

// Check says in one line what is wrong with them.
func (options Options) Check() error {
	switch {
	case options.Node == "":
		return fmt.Errorf("--node has to name this node")
	case options.Limits.Images == "" || options.Limits.Images[0] != '/':
		return fmt.Errorf("--images is an absolute path, not '%s'", options.Limits.Images)
	case options.Limits.Programs == "" || options.Limits.Programs[0] != '/':
		return fmt.Errorf("--programs is an absolute path, not '%s'", options.Limits.Programs)
	case options.Beat <= 0 || options.Grace < 0:
		return fmt.Errorf("--beat is more than nothing, and --grace not less")
	case options.LostAfter <= 0:
		return fmt.Errorf("--lost-after is more than nothing: a host that says nothing for a moment is not lost")
	}
	return nil
}
