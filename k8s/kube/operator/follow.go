package operator

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// byNameOnHosts is the cache's index of objects.
const byNameOnHosts = "name-on-hosts"

// follower hears the daemon beside this operator: what happens there becomes an event of the object, and a VM that is another than it was is looked at.
type follower struct {
	client.Client
	name   string
	daemon *control.Client
	report *report
	host   *host
	events record.EventRecorder
	// changed are objects to be looked at, by their kinds.
	changed map[*kind]chan event.GenericEvent
	// beat is how often the host says that it is there.
	beat time.Duration
}

// NeedLeaderElection says that every operator does this.
func (follower *follower) NeedLeaderElection() bool { return false }

// Start runs until the context ends.
func (follower *follower) Start(ctx context.Context) error {
	var beats sync.WaitGroup
	beats.Add(2)
	go func() {
		defer beats.Done()
		follower.beats(ctx, func() {
			if err := follower.report.write(ctx); err != nil && ctx.Err() == nil {
				klog.InfoS("the DunlinHost's status was not written; it is tried again", "problem", err)
			}
		})
	}()
	// It may take minutes, and this host would count as silent meanwhile.
	go func() {
		defer beats.Done()
		follower.beats(ctx, func() {
			if err := follower.host.tidy(ctx); err != nil && ctx.Err() == nil {
				klog.InfoS("not tidied up; it is tried again", "problem", err)
			}
		})
	}()
	for ctx.Err() == nil {
		err := follower.follow(ctx)
		klog.V(1).InfoS("the daemon is not followed", "problem", err)
		select {
		case <-ctx.Done():
		case <-time.After(time.Second): // nothing tells when a daemon is there
		}
	}
	beats.Wait()
	return nil
}

// beats does something at each beat, and at once.
func (follower *follower) beats(ctx context.Context, do func()) {
	beat := time.NewTicker(follower.beat)
	defer beat.Stop()
	for {
		do()
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
		}
	}
}

// follow hears a daemon until it is gone.
func (follower *follower) follow(ctx context.Context) error {
	seen := map[string]string{}
	return follower.daemon.Follow(ctx, func(happened *control.Event) error {
		if happened != nil && happened.VM != "" {
			follower.pass(ctx, happened)
		}
		status, err := follower.daemon.Status(ctx)
		if err != nil {
			return err
		}
		if len(seen) == 0 {
			// It is there, or there again.
			if version, err := follower.daemon.Version(ctx, status.Host); err == nil {
				follower.report.setVersion(version)
			}
			seen[""] = ""
			follower.all(ctx)
		}
		now, led := map[string]string{"": ""}, map[string]bool{}
		for _, vm := range status.VMs {
			led[vm.Name] = vm.Leader == follower.name
			joins := ""
			if vm.JoinProblem != nil {
				joins = vm.JoinProblem.Why
			}
			now[vm.Name] = fmt.Sprint(vm.Role, vm.State, vm.Why, vm.Leader, vm.Term, vm.Protected, vm.Policy, vm.Peers, vm.Standby, joins)
		}
		follower.host.setLed(led)
		for name := range seen {
			if _, there := now[name]; !there {
				follower.look(ctx, name)
			}
		}
		for name, as := range now {
			if seen[name] != as {
				follower.look(ctx, name)
			}
		}
		seen = now
		return nil
	})
}

// find returns the object that has this VM or program, if there is one.
func (follower *follower) find(ctx context.Context, name string) v1alpha1.Protected {
	for _, kind := range kinds {
		if found, err := kind.all(ctx, follower, client.MatchingFields{byNameOnHosts: name}); err == nil && len(found) == 1 {
			return found[0]
		}
	}
	return nil
}

// look has an object looked at.
func (follower *follower) look(ctx context.Context, name string) {
	if object := follower.find(ctx, name); object != nil {
		follower.send(ctx, object)
	}
}

// all has all objects looked at.
func (follower *follower) all(ctx context.Context) {
	for _, kind := range kinds {
		all, err := kind.all(ctx, follower)
		if err != nil {
			continue
		}
		for _, object := range all {
			follower.send(ctx, object)
		}
	}
}

func (follower *follower) send(ctx context.Context, object v1alpha1.Protected) {
	select {
	case follower.changed[kindOf(object)] <- event.GenericEvent{Object: object}:
	case <-ctx.Done():
	}
}

// pass makes the daemon's event one of the object's.
func (follower *follower) pass(ctx context.Context, happened *control.Event) {
	if object := follower.find(ctx, happened.VM); object != nil {
		follower.events.Eventf(object, typeOf(happened.Kind), reason(happened.Kind), "on host %s: %s", happened.Host, happened.Text)
	}
}
