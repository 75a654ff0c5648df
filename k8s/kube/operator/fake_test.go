package operator_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// daemon says what a test wants of its VMs, at a control socket, as a daemon of Dunlin's does; it carries nothing out, and notes what it is told to do.
type daemon struct {
	name, socket string
	mutex        sync.Mutex
	vms          []control.VM
	// kvm is what it says of its host: true or false, or nil, as daemons did that did not say it.
	kvm    any
	orders []string
	// refuses is what it answers to an order to give a part to another host; nothing if it does as it is told.
	refuses string
	// refusesUp and refusesDown are what it answers to an order to start a VM, or to end it; nothing if it does as it is told.
	refusesUp, refusesDown string
	// lacks are hosts that refuse a part, and why.
	lacks map[string]string
	// asked is how often somebody has asked how its VMs are.
	asked int
	news  chan struct{}
}

func newDaemon(t *testing.T, name string) *daemon {
	t.Helper()
	// A control socket's path is short, whatever a test is called.
	folder, err := os.MkdirTemp("", "dunlin-")
	if err != nil {
		t.Fatal(err)
	}
	daemon := &daemon{name: name, socket: filepath.Join(folder, "s"), kvm: true, news: make(chan struct{})}
	listener, err := net.Listen("unix", daemon.socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go daemon.answer(conn)
		}
	}()
	t.Cleanup(func() {
		listener.Close()
		os.RemoveAll(folder)
	})
	return daemon
}

func (daemon *daemon) answer(conn net.Conn) {
	defer conn.Close()
	line, err := bufio.NewReader(conn).ReadBytes('\n')
	if err != nil {
		return
	}
	var request struct {
		Do, VM, Policy           string
		Backup, Witness, Standby string
		Unprotected              bool `json:"unprotected_meanwhile"`
		NoStandby                bool `json:"no_standby"`
	}
	if json.Unmarshal(line, &request) != nil {
		return
	}
	out := json.NewEncoder(conn)
	daemon.mutex.Lock()
	switch request.Do {
	case "status":
		daemon.asked++
		_ = out.Encode(map[string]any{"answer": "status", "host": daemon.name, "kvm": daemon.kvm, "vms": daemon.vms, "logs": []any{}})
	case "cluster":
		_ = out.Encode(map[string]any{"answer": "member", "host": daemon.name, "version": "0.0.0"})
	case "events":
		for err == nil {
			news := daemon.news
			err = out.Encode(map[string]any{"answer": "alive"})
			daemon.mutex.Unlock()
			<-news
			daemon.mutex.Lock()
		}
	case "move":
		order := "backup to " + request.Backup
		if request.Witness != "" {
			order = "witness to " + request.Witness
		}
		if request.Standby != "" {
			order = "standby " + request.Standby
		}
		if request.NoStandby {
			order = "no standby"
		}
		if request.Unprotected {
			order += ", unprotected meanwhile"
		}
		daemon.orders = append(daemon.orders, order)
		if why := cmp.Or(daemon.refuses, daemon.lacks[request.Standby], daemon.lacks[request.Backup]); why != "" {
			_ = out.Encode(map[string]any{"answer": "failed", "why": why, "code": 1})
			daemon.mutex.Unlock()
			return
		}
	default:
		daemon.orders = append(daemon.orders, strings.TrimSpace(request.Do+" "+request.Policy))
		if why := map[string]string{"up": daemon.refusesUp, "down": daemon.refusesDown}[request.Do]; why != "" {
			_ = out.Encode(map[string]any{"answer": "failed", "why": why, "code": 1})
			daemon.mutex.Unlock()
			return
		}
	}
	daemon.mutex.Unlock()
	_ = out.Encode(map[string]any{"answer": "done"})
}

// says is how its VMs are from now on, and whoever follows hears that something has happened.
func (daemon *daemon) says(vms ...control.VM) {
	daemon.mutex.Lock()
	defer daemon.mutex.Unlock()
	daemon.vms = vms
	close(daemon.news)
	daemon.news = make(chan struct{})
}

// refuse has it refuse from now on, or not any more, and returns how often it has been told something.
func (daemon *daemon) refuse(why string) int {
	daemon.mutex.Lock()
	defer daemon.mutex.Unlock()
	daemon.refuses = why
	return len(daemon.orders)
}

// saysOfKVM is what it says of its host from now on.
func (daemon *daemon) saysOfKVM(kvm any) {
	daemon.mutex.Lock()
	defer daemon.mutex.Unlock()
	daemon.kvm = kvm
}

// hostLacks has a host refuse a part from now on.
func (daemon *daemon) hostLacks(host, why string) {
	daemon.mutex.Lock()
	defer daemon.mutex.Unlock()
	daemon.lacks = map[string]string{host: why}
}

func (daemon *daemon) told() []string {
	daemon.mutex.Lock()
	defer daemon.mutex.Unlock()
	return append([]string(nil), daemon.orders...)
}

func (daemon *daemon) times() int {
	daemon.mutex.Lock()
	defer daemon.mutex.Unlock()
	return daemon.asked
}

// isHeard says the same in other words, again and again, until its operator has surely judged what was said before: it asks once when it hears that something
// has happened, once more when it looks at the object, and looks at an object once at a time.
func (daemon *daemon) isHeard(t *testing.T, vm control.VM) {
	t.Helper()
	for time := 0; time < 4; time++ {
		before := daemon.times()
		vm.JoinProblem = &struct {
			Why   string `json:"why"`
			Times uint32 `json:"times"`
		}{Why: fmt.Sprintf("said by %s for the time %d", daemon.name, time)}
		daemon.says(vm)
		testbed.Until(t, "the operator beside daemon "+daemon.name+" hears it", func() error {
			if now := daemon.times(); now < before+2 {
				return fmt.Errorf("it has asked %d times", now-before)
			}
			return nil
		})
	}
}

// stage is a control plane, a ProtectedVM that has its hosts and runs, a daemon for each that says what the test wants, and the operators, which are real.
type stage struct {
	*testing.T
	plane     *lab.Plane
	api       client.WithWatch
	daemons   map[string]*daemon
	operators map[string]*testbed.Process
	// lostAfter is how long operators wait for a silent host.
	lostAfter string
	// ordered is when the test first asked for an order.
	ordered map[string]time.Time
	// beat is how often operators say that they are there, and tidy up.
	beat string
	// standby is the one that daemons name, where there is one.
	standby string
	// history is every version of the object that there was.
	mutex   sync.Mutex
	history []v1alpha1.ProtectedVM
}

func newStage(t *testing.T) *stage {
	stage := &stage{T: t, plane: lab.Begin(t), daemons: map[string]*daemon{}, operators: map[string]*testbed.Process{}, ordered: map[string]time.Time{}, lostAfter: "5m", beat: "5m"}
	stage.plane.Install(t)
	stage.plane.Rights(t)
	api, err := client.NewWithWatch(stage.plane.Config(), client.Options{Scheme: scheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	stage.api = api
	ctx, end := context.WithCancel(context.Background())
	t.Cleanup(end)
	watch, err := api.Watch(ctx, &v1alpha1.ProtectedVMList{}, client.InNamespace("default"))
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for event := range watch.ResultChan() {
			if vm, ok := event.Object.(*v1alpha1.ProtectedVM); ok {
				stage.mutex.Lock()
				stage.history = append(stage.history, *vm)
				stage.mutex.Unlock()
			}
		}
	}()
	stage.create(&v1alpha1.ProtectedVM{ObjectMeta: named("shop"), Spec: v1alpha1.ProtectedVMSpec{
		Strength: 2, Policy: "dunlin", VM: v1alpha1.VM{MemoryMiB: 64, Kernel: "/images/default/k"},
	}})
	vm := stage.get()
	before := vm.DeepCopy()
	started := now()
	vm.Status.Placement = &v1alpha1.Placement{Members: []string{"a", "b"}, Witness: "c", Strength: 2, Storage: "gannet"}
	vm.Status.Started = &started
	if err := api.Status().Patch(ctx, vm, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b", "c"} {
		stage.host(name)
	}
	return stage
}

// host adds a node with a daemon.
func (stage *stage) host(name string) {
	stage.Helper()
	stage.create(lab.Node(name, "", "4", "4Gi"))
	stage.daemons[name] = newDaemon(stage.T, name)
}

// operator starts the one beside a daemon, which reaches the API server at this address. Its beats are rare, so that it asks its daemon when the
// daemon or the object has changed, and at no other time.
func (stage *stage) operator(name, address string) {
	stage.Helper()
	kubeconfig := stage.plane.KubeconfigAs(stage.T, "operator-"+name, address, lab.OperatorAccount)
	process, err := testbed.Start(stage.T, nil, lab.Operator(stage.T), "--kubeconfig", kubeconfig,
		"--node", name, "--socket", stage.daemons[name].socket, "--images", "/images", "--metrics", "0", "--beat", stage.beat, "--grace", "5m", "--lost-after", stage.lostAfter)
	if err != nil {
		stage.Fatal(err)
	}
	stage.operators[name] = process
}

func (stage *stage) create(object client.Object) {
	stage.Helper()
	if err := stage.api.Create(context.Background(), object); err != nil {
		stage.Fatalf("%s: %v", object.GetName(), err)
	}
}

func (stage *stage) get() *v1alpha1.ProtectedVM {
	stage.Helper()
	vm, err := stage.read()
	if err != nil {
		stage.Fatal(err)
	}
	return vm
}

// read is [stage.get] for whoever asks again: a server whose disk stands still for some seconds answers with an error.
func (stage *stage) read() (*v1alpha1.ProtectedVM, error) {
	vm := &v1alpha1.ProtectedVM{}
	return vm, stage.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: "shop"}, vm)
}

// delete deletes the object when it has its finalizer: before that it would be gone at once.
func (stage *stage) delete() {
	stage.Helper()
	testbed.Until(stage.T, "it has its finalizer", func() error {
		vm, err := stage.read()
		if err == nil && !slices.Contains(vm.Finalizers, operator.Finalizer) {
			return fmt.Errorf("it has %v", vm.Finalizers)
		}
		return err
	})
	if err := stage.api.Delete(context.Background(), stage.get()); err != nil {
		stage.Fatal(err)
	}
}

func (stage *stage) until(what string, is func(v1alpha1.ProtectedStatus) bool) v1alpha1.ProtectedStatus {
	stage.Helper()
	var status v1alpha1.ProtectedStatus
	testbed.Until(stage.T, what, func() error {
		vm, err := stage.read()
		if status = vm.Status; err == nil && !is(status) {
			return fmt.Errorf("%+v", status)
		}
		return err
	})
	return status
}

// all are the versions of the object that there were so far, the newest one among them.
func (stage *stage) all() []v1alpha1.ProtectedVM {
	stage.Helper()
	newest := stage.get().ResourceVersion
	var all []v1alpha1.ProtectedVM
	testbed.Until(stage.T, "the watch has the newest version", func() error {
		stage.mutex.Lock()
		defer stage.mutex.Unlock()
		all = append([]v1alpha1.ProtectedVM(nil), stage.history...)
		// It need not be the last: another one may have come since it was asked for.
		if !slices.ContainsFunc(all, func(vm v1alpha1.ProtectedVM) bool { return vm.ResourceVersion == newest }) {
			return fmt.Errorf("of %d versions none is %s", len(all), newest)
		}
		return nil
	})
	return all
}

func (stage *stage) events(reason string) int {
	stage.Helper()
	list, count := &v1.EventList{}, 0
	if err := stage.api.List(context.Background(), list, client.InNamespace("default")); err != nil {
		stage.Fatal(err)
	}
	for _, event := range list.Items {
		if event.Reason == reason {
			count += int(max(event.Count, 1))
		}
	}
	return count
}

// tellsOf waits until so many events have this reason: operators write them after the status, on a goroutine of their own.
func (stage *stage) tellsOf(reason string, times int) {
	stage.Helper()
	testbed.Until(stage.T, fmt.Sprintf("events tell of it as often as it happened: %s", reason), func() error {
		if count := stage.events(reason); count != times {
			return fmt.Errorf("there are %d, not %d", count, times)
		}
		return nil
	})
}
