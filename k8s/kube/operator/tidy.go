package operator

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// beatsAlone are how many beats in a row nobody else may know a VM before what is left of it is taken away.
const beatsAlone = 3

// tidy takes away what is left here of objects that are no more: of a host that was not there when its VM was ended.
//
// The trap: somebody may have brought an old state of Kubernetes back, in which a VM that runs has no object; and for a moment nobody leads its group. So that an
// object is not found, and that nobody leads, says nothing yet. A VM's object goes when a majority of its hosts have nothing any more, and these forget it: so all
// other hosts of its group have to have forgotten it, for some beats in a row. What any of them has still is left to a person.
func (host *host) tidy(ctx context.Context) error {
	status, err := host.daemon.Status(ctx)
	if err != nil {
		return nil
	}
	var problem error
	for _, mine := range host.report.remembered() {
		if err := host.tidyOne(ctx, mine, status); err != nil {
			problem = err
		}
	}
	return problem
}

func (host *host) tidyOne(ctx context.Context, mine memory, status control.Host) error {
	kind := kindNamed(mine.Kind)
	object, err := host.find(ctx, kind, mine)
	if err != nil {
		return err
	}
	left, isLeft := status.Find(mine.VM)
	if object != nil {
		delete(host.alone, mine.VM)
		// Its part may have gone to another host, or its object is one of before it had any hosts.
		if placement := object.Seen().Placement; !isLeft && (placement == nil || !has(object.Seen().Hosts(), host.name)) {
			host.drop(mine)
		}
		return nil
	}
	host.forgetAll(mine.VM)
	if !isLeft {
		delete(host.alone, mine.VM)
		host.drop(mine)
		return nil
	}
	if left.Leader != "" {
		delete(host.alone, mine.VM)
		return fmt.Errorf("%s '%s' has no %s any more and host '%s' serves it: 'dunlin down %s' ends it", kind.word, mine.VM, kind.name, left.Leader, mine.VM)
	}
	if other, err := host.otherHas(ctx, left); err != nil {
		return err
	} else if other != "" {
		delete(host.alone, mine.VM)
		return fmt.Errorf("%s '%s' has no %s any more, and is left as it is: %s; 'dunlin down %s' ends it", kind.word, mine.VM, kind.name, other, mine.VM)
	}
	if host.alone == nil {
		host.alone = map[string]int{}
	}
	if host.alone[mine.VM]++; host.alone[mine.VM] < beatsAlone {
		return nil
	}
	ctx, end := context.WithTimeout(ctx, longest)
	defer end()
	if err := host.daemon.Forget(ctx, mine.VM); err != nil {
		return fmt.Errorf("what is left of %s '%s': %w", kind.word, mine.VM, err)
	}
	delete(host.alone, mine.VM)
	return nil
}

// drop forgets a VM of which this host has nothing any more, and what Prometheus was told of it, unless it has another one of that name.
func (host *host) drop(mine memory) {
	host.report.forget(mine)
	kind := kindNamed(mine.Kind)
	for _, other := range host.report.remembered() {
		if kindNamed(other.Kind) == kind && other.Namespace == mine.Namespace && other.Name == mine.Name {
			return
		}
	}
	kind.protected.DeleteLabelValues(mine.Namespace, mine.Name)
	kind.failOvers.DeleteLabelValues(mine.Namespace, mine.Name)
}

// find is the object that this host remembers, if it is there. What the cache has not is asked of etcd; what it has is there.
func (host *host) find(ctx context.Context, kind *kind, mine memory) (v1alpha1.Protected, error) {
	for _, reader := range []client.Reader{host.Client, host.live} {
		object := kind.empty()
		err := reader.Get(ctx, client.ObjectKey{Namespace: mine.Namespace, Name: mine.Name}, object)
		if err == nil && NameOnHosts(object) == mine.VM {
			return object, nil
		}
		// A server that does not know the kind says that there is none of it, too.
		if err != nil && (!apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)) {
			return nil, err
		}
	}
	return nil, nil
}

// otherHas says which other host of its group may have something of a VM, as etcd has it; nothing if none has.
func (host *host) otherHas(ctx context.Context, left control.VM) (string, error) {
	var others []string
	for _, peer := range left.Peers {
		others = append(others, peer.Host)
	}
	if left.Standby != "" {
		others = append(others, left.Standby)
	}
	others = without(others, host.name)
	if len(others) == 0 {
		// Its object goes when this host says that it has nothing, and not before.
		return "no other host is in its group", nil
	}
	for _, name := range others {
		there := &v1alpha1.DunlinHost{}
		if err := host.live.Get(ctx, client.ObjectKey{Name: name}, there); apierrors.IsNotFound(err) {
			return fmt.Sprintf("host '%s' of its group has no DunlinHost that could say that it has nothing", name), nil
		} else if err != nil {
			return "", err
		}
		for _, vm := range there.Status.VMs {
			if vm.VM == left.Name {
				return fmt.Sprintf("host '%s' may have it too", name), nil
			}
		}
	}
	return "", nil
}
