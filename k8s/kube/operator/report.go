package operator

import (
	"context"
	"sort"
	"sync"
	"syscall"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// report writes the status of this host's DunlinHost, and makes the object if there is none. It alone writes it, but for Ready, which the elected operator
// sets to Unknown when nothing is heard of the host any more.
type report struct {
	api  client.Client
	live client.Reader
	// name is the node's, and has to be what the daemon calls its host.
	name   string
	daemon *control.Client
	images string
	// mutex is held over a write, so that writes are in order.
	mutex sync.Mutex
	read  bool
	vms   map[string]v1alpha1.HostVM
	// times is how often each was remembered: what is remembered anew meanwhile is not forgotten.
	times   map[string]int
	version string
}

// memory is a VM or a program that was remembered so many times.
type memory struct {
	v1alpha1.HostVM
	times int
}

// write says how the host is now.
func (report *report) write(ctx context.Context) error {
	report.mutex.Lock()
	defer report.mutex.Unlock()
	return report.writeLocked(ctx)
}

func (report *report) writeLocked(ctx context.Context) error {
	object := &v1alpha1.DunlinHost{}
	err := report.live.Get(ctx, client.ObjectKey{Name: report.name}, object)
	if apierrors.IsNotFound(err) {
		object.Name = report.name
		err = report.api.Create(ctx, object)
	}
	if err != nil {
		return err
	}
	if !report.read {
		// What an operator before this one remembered.
		for _, vm := range object.Status.VMs {
			if _, known := report.vms[vm.VM]; !known {
				report.vms[vm.VM] = vm
			}
		}
		report.read = true
	}
	before := object.DeepCopy()
	report.compose(ctx, object)
	if equality.Semantic.DeepEqual(before.Status, object.Status) {
		return nil
	}
	return report.api.Status().Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

func (report *report) compose(ctx context.Context, object *v1alpha1.DunlinHost) {
	now := metav1.Now().Rfc3339Copy()
	status := &object.Status
	status.Heard, status.DiskFreeMiB = &now, freeMiB(report.images)
	status.VMs = nil
	for _, vm := range report.vms {
		status.VMs = append(status.VMs, vm)
	}
	sort.Slice(status.VMs, func(i, j int) bool { return status.VMs[i].VM < status.VMs[j].VM })
	// What they are not known to have they are not placed for.
	if all, err := programs.all(ctx, report.api); err == nil {
		status.Data = dataThere(all, report.images)
	}
	is, why, words := metav1.ConditionTrue, "DaemonAnswers", "its daemon answers"
	host, err := report.daemon.Status(ctx)
	switch {
	case err != nil:
		is, why, words = metav1.ConditionFalse, "NoDaemon", err.Error()
	case host.Host != report.name:
		is, why, words = metav1.ConditionFalse, "OtherName", "the daemon on node '"+report.name+"' calls its host '"+host.Host+"': both have to be the same"
	default:
		status.Links = nil
		for name, connected := range host.Links() {
			status.Links = append(status.Links, v1alpha1.Link{Host: name, Connected: connected})
		}
		sort.Slice(status.Links, func(i, j int) bool { return status.Links[i].Host < status.Links[j].Host })
		// An operator in a Pod sees another /dev than its node's. What a daemon does not say, copies do not count on.
		status.Version, status.KVM = report.version, host.KVM
	}
	set(&status.Conditions, object.Generation, Ready, is, why, words)
}

// remember writes that this host may have something of a VM or a program.
func (report *report) remember(ctx context.Context, object v1alpha1.Protected) error {
	report.mutex.Lock()
	defer report.mutex.Unlock()
	name := NameOnHosts(object)
	report.times[name]++
	if _, known := report.vms[name]; known && report.read {
		return nil
	}
	report.vms[name] = v1alpha1.HostVM{VM: name, Kind: kindOf(object).name, Namespace: object.GetNamespace(), Name: object.GetName()}
	err := report.writeLocked(ctx)
	if err != nil {
		delete(report.vms, name)
	}
	return err
}

func (report *report) remembered() []memory {
	report.mutex.Lock()
	defer report.mutex.Unlock()
	var all []memory
	for name, vm := range report.vms {
		all = append(all, memory{vm, report.times[name]})
	}
	return all
}

// forget is said of with the next write.
func (report *report) forget(mine memory) {
	report.mutex.Lock()
	defer report.mutex.Unlock()
	if report.times[mine.VM] == mine.times {
		delete(report.vms, mine.VM)
		delete(report.times, mine.VM)
	}
}

func (report *report) setVersion(version string) {
	report.mutex.Lock()
	defer report.mutex.Unlock()
	report.version = version
}

// freeMiB is what is free where images lie, or where the folder would be.
func freeMiB(folder string) int64 {
	var there syscall.Statfs_t
	if err := syscall.Statfs(folder, &there); err != nil {
		return 0
	}
	return int64(there.Bavail) * there.Bsize >> 20
}
