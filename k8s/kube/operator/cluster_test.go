package operator_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// cluster is a control plane with a node object for each of three real daemons, or more, in networks of their own, and on each an operator and a scheduler. No
// kubelet is there: Pods stand for copies, and nothing has to run in them.
type cluster struct {
	*testing.T
	plane     *lab.Plane
	hosts     *testbed.Hosts
	api       client.Client
	images    string
	programs  string
	metrics   string
	operators map[string]*testbed.Process
	// lostAfter is how long operators wait for a silent host.
	lostAfter string
	// unanswered is what redis has counted without having said so.
	unanswered int
}

func begin(t *testing.T) *cluster { return beginWith(t, "5m") }

// beginWith has further hosts, without schedulers.
func beginWith(t *testing.T, lostAfter string, more ...string) *cluster {
	t.Helper()
	if testing.Short() {
		testbed.Skip(t, "minutes with real daemons and guests, which 'cargo xtask k8s test' has")
	}
	cluster := &cluster{T: t, plane: lab.Begin(t), hosts: testbed.Apart(t, more...), operators: map[string]*testbed.Process{}, lostAfter: lostAfter}
	cluster.plane.Install(t)
	cluster.plane.Rights(t)
	api, err := client.New(cluster.plane.Config(), client.Options{Scheme: scheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	cluster.api = api
	cluster.guest()
	free, err := testbed.FreeAddresses(1)
	if err != nil {
		t.Fatal(err)
	}
	cluster.metrics = free[0]
	cluster.hosts.Start(t)
	lab.BeginLog(t, cluster.hosts)
	// A scheduler that asks a daemon without the log ends.
	three := len(cluster.hosts.Names) - len(more)
	for _, name := range cluster.hosts.Names {
		cluster.create(lab.Node(name, "", "4", "4Gi"))
		if slices.Contains(more, name) {
			cluster.operator(name)
			continue
		}
		scheduler := lab.Scheduler(t, cluster.plane.KubeconfigAs(t, "scheduler-"+name, cluster.plane.Address(), lab.SchedulerAccount), lab.SchedulerArgs(name, cluster.hosts.Sockets(name)[:three]))
		scheduler.Until(t, "has read what is agreed")
		cluster.operator(name)
	}
	return cluster
}

// scheme has all kinds that are spoken of here.
func scheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return scheme
}

// guest gives each host the same kernel and initrd.
func (cluster *cluster) guest() {
	cluster.images = lab.Guest(cluster)
	cluster.programs = filepath.Join(cluster.images, "programs")
}

// operator starts a host's, with no more rights than the manifest gives it.
func (cluster *cluster) operator(name string) {
	cluster.Helper()
	kubeconfig := cluster.plane.KubeconfigAs(cluster.T, "operator-"+name, cluster.plane.Address(), lab.OperatorAccount)
	metrics := "0"
	if name == "a" {
		metrics = cluster.metrics
	}
	process, err := testbed.Start(cluster.T, nil, lab.Operator(cluster.T), "--kubeconfig", kubeconfig,
		"--node", name, "--socket", cluster.hosts.Socket(name), "--images", cluster.images, "--programs", cluster.programs, "--users", "nobody,"+user(cluster.T), "--bridges", "br0", "--metrics", metrics, "--beat", "1s", "--grace", "5s",
		"--lost-after", cluster.lostAfter)
	if err != nil {
		cluster.Fatal(err)
	}
	cluster.operators[name] = process
}

func (cluster *cluster) create(object client.Object) {
	cluster.Helper()
	if err := cluster.api.Create(context.Background(), object); err != nil {
		cluster.Fatalf("%s: %v", object.GetName(), err)
	}
}

// shop is a ProtectedVM with the redis guest.
func (cluster *cluster) shop(name string) *v1alpha1.ProtectedVM {
	image := func(name string) string { return filepath.Join(cluster.images, "default", name) }
	return &v1alpha1.ProtectedVM{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: v1alpha1.ProtectedVMSpec{Strength: 2, Policy: "dunlin", VM: v1alpha1.VM{
			MemoryMiB: 256, Accel: "tcg", Kernel: image("vmlinuz"), Initrd: image("initrd.img"), Append: os.Getenv("DUNLIN_GUEST_APPEND"),
			NICs: []v1alpha1.NIC{{MAC: "52:54:00:12:34:56", Bridge: "br0"}},
		}},
	}
}

func (cluster *cluster) get(name string) *v1alpha1.ProtectedVM {
	cluster.Helper()
	vm := &v1alpha1.ProtectedVM{}
	if err := cluster.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: name}, vm); err != nil {
		cluster.Fatal(err)
	}
	return vm
}

// until waits until a ProtectedVM is so.
func (cluster *cluster) until(name, what string, is func(*v1alpha1.ProtectedVM) bool) *v1alpha1.ProtectedVM {
	cluster.Helper()
	vm := &v1alpha1.ProtectedVM{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}}
	cluster.untilIs(vm, what, func() bool { return is(vm) })
	return vm
}

// untilIs reads an object again and again until it is so.
func (cluster *cluster) untilIs(object v1alpha1.Protected, what string, is func() bool) {
	cluster.Helper()
	testbed.Until(cluster.T, what, func() error {
		if err := cluster.api.Get(context.Background(), client.ObjectKeyFromObject(object), object); err != nil {
			return err
		}
		if !is() {
			return fmt.Errorf("%+v", object.Seen())
		}
		return nil
	})
	cluster.Logf("%s: %s", time.Now().UTC().Format("15:04:05"), what)
}

// untilSays waits for a condition with these words.
func (cluster *cluster) untilSays(name, kind string, status metav1.ConditionStatus, words string) *v1alpha1.ProtectedVM {
	cluster.Helper()
	return cluster.until(name, fmt.Sprintf("%s of '%s' is %s: %s", kind, name, status, words), func(vm *v1alpha1.ProtectedVM) bool {
		return says(vm, kind, status, words)
	})
}

// says is whether a condition has these words.
func says(object v1alpha1.Protected, kind string, status metav1.ConditionStatus, words string) bool {
	condition := meta.FindStatusCondition(object.Seen().Conditions, kind)
	return condition != nil && condition.Status == status && strings.Contains(condition.Message, words)
}

// change changes a ProtectedVM's spec as 'kubectl apply' does.
func (cluster *cluster) change(name string, edit func(*v1alpha1.ProtectedVMSpec)) {
	cluster.Helper()
	vm := cluster.get(name)
	before := vm.DeepCopy()
	edit(&vm.Spec)
	if err := cluster.api.Patch(context.Background(), vm, client.MergeFrom(before)); err != nil {
		cluster.Fatal(err)
	}
}

// event waits until an object has an event with these words.
func (cluster *cluster) event(name, reason, words string) {
	cluster.Helper()
	testbed.Until(cluster.T, "an event "+reason+": "+words, func() error {
		list := &v1.EventList{}
		if err := cluster.api.List(context.Background(), list, client.InNamespace("default")); err != nil {
			return err
		}
		var all []string
		for _, event := range list.Items {
			if event.InvolvedObject.Name == name && event.Reason == reason && strings.Contains(event.Message, words) {
				return nil
			}
			all = append(all, event.InvolvedObject.Name+" "+event.Reason+": "+event.Message)
		}
		return fmt.Errorf("there are %s", strings.Join(all, "\n"))
	})
}

// host waits until a DunlinHost's Ready is so.
func (cluster *cluster) host(name string, status metav1.ConditionStatus) *v1alpha1.DunlinHost {
	cluster.Helper()
	host := &v1alpha1.DunlinHost{}
	testbed.Until(cluster.T, fmt.Sprintf("host %s: Ready is %s", name, status), func() error {
		if err := cluster.api.Get(context.Background(), client.ObjectKey{Name: name}, host); err != nil {
			return err
		}
		if !meta.IsStatusConditionPresentAndEqual(host.Status.Conditions, operator.Ready, status) {
			return fmt.Errorf("%+v", host.Status)
		}
		return nil
	})
	return host
}

// end deletes a ProtectedVM and waits until it is gone, with its Pods.
func (cluster *cluster) end(name string) {
	cluster.Helper()
	cluster.endOf(cluster.get(name))
}

func (cluster *cluster) endOf(object v1alpha1.Protected) {
	cluster.Helper()
	if err := cluster.api.Delete(context.Background(), object); err != nil {
		cluster.Fatal(err)
	}
	cluster.isGone(object)
}

// isGone waits until a deleted object is gone, and looks for its Pods.
func (cluster *cluster) isGone(object v1alpha1.Protected) {
	cluster.Helper()
	testbed.Until(cluster.T, "the object is gone", func() error {
		err := cluster.api.Get(context.Background(), client.ObjectKeyFromObject(object), object)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("%v: %+v", err, object.Seen())
	})
	pods := &v1.PodList{}
	if err := cluster.api.List(context.Background(), pods, client.InNamespace(object.GetNamespace())); err != nil {
		cluster.Fatal(err)
	}
	for _, pod := range pods.Items {
		if metav1.IsControlledBy(&pod, object) {
			cluster.Errorf("Pod '%s' is left", pod.Name)
		}
	}
	cluster.Logf("%s: '%s' is gone", time.Now().UTC().Format("15:04:05"), object.GetName())
}

// status is what a host's daemon says.
func (cluster *cluster) status(name string) control.Host {
	cluster.Helper()
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	host, err := control.New(cluster.hosts.Socket(name)).Status(ctx)
	if err != nil {
		cluster.Fatal(err)
	}
	return host
}

// nothingIsLeft waits until a host has nothing of any VM: not in its daemon, its object, its network, and no process.
func (cluster *cluster) nothingIsLeft(name string) {
	cluster.Helper()
	testbed.Until(cluster.T, "nothing is left on host "+name, func() error {
		if host := cluster.status(name); len(host.VMs) > 0 {
			return fmt.Errorf("its daemon has %+v", host.VMs)
		}
		host := &v1alpha1.DunlinHost{}
		if err := cluster.api.Get(context.Background(), client.ObjectKey{Name: name}, host); err != nil || len(host.Status.VMs) > 0 {
			return fmt.Errorf("its object has %+v, %v", host.Status.VMs, err)
		}
		for _, interfaceName := range cluster.hosts.Interfaces(cluster.T, name) {
			if interfaceName != "lo" && interfaceName != "br0" && interfaceName != "up0" {
				return fmt.Errorf("interface %s", interfaceName)
			}
		}
		children, err := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", cluster.hosts.Process(name).Pid()))
		if err != nil || strings.TrimSpace(string(children)) != "" {
			return fmt.Errorf("processes %s, %v", children, err)
		}
		kept, err := filepath.Glob(filepath.Join(cluster.hosts.Folder(name), "state", "vms", "*"))
		if err != nil || len(kept) > 0 {
			return fmt.Errorf("files %v, %v", kept, err)
		}
		return nil
	})
}

// increments asks the redis at this address to count, from a host's network, until it answers. It says what is wanted, and more where it has counted what it did not
// come to answer: whoever asks cannot know, and asks again. At ":1" it has just begun.
func (cluster *cluster) increments(from, address, want string) {
	cluster.Helper()
	wanted, err := strconv.Atoi(strings.TrimPrefix(want, ":"))
	if err != nil {
		cluster.Fatal(err)
	}
	if wanted == 1 {
		cluster.unanswered = 0
	}
	least, asked := wanted+cluster.unanswered, 0
	line := `exec 3<>/dev/tcp/` + address + `/6379 && echo asks && printf 'INCR served\r\n' >&3 && head -n 1 <&3`
	testbed.Until(cluster.T, "redis answers", func() error {
		command := cluster.hosts.Command(from, "timeout", "10", "bash", "-c", line)
		out, err := command.Output()
		answer, asks := strings.CutPrefix(string(out), "asks\n")
		if asks {
			asked++
		}
		said := strings.TrimSpace(answer)
		if err != nil || said == "" {
			exit, _ := err.(*exec.ExitError)
			if exit != nil {
				err = fmt.Errorf("%w: %s", err, exit.Stderr)
			}
			return fmt.Errorf("'%s', %v", said, err)
		}
		count, err := strconv.Atoi(strings.TrimPrefix(said, ":"))
		if err != nil || count < least {
			cluster.Fatalf("redis says %s and not :%d: what was acknowledged is not there", said, least)
		}
		if count >= least+asked {
			cluster.Fatalf("redis says %s and not :%d, and was asked %d times: it has counted something twice", said, least, asked)
		}
		cluster.unanswered = count - wanted
		return nil
	})
}
