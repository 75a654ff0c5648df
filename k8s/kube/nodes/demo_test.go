package nodes_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/nodes"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// guest is the address of the VM's redis.
const guest = "10.77.0.10"

// demo is four nodes, each with a daemon, a kubelet, a containerd, and an operator in a Pod; on three of them a scheduler in a Pod as well.
type demo struct {
	*testing.T
	plane *lab.Plane
	hosts *testbed.Hosts
	api   client.Client
	nodes map[string]*nodes.Node
	disk  string
}

func begin(t *testing.T) *demo {
	t.Helper()
	if testing.Short() {
		testbed.Skip(t, "minutes with real nodes and a guest, which 'cargo xtask k8s demo' has")
	}
	demo := &demo{T: t, plane: lab.Begin(t), hosts: testbed.Apart(t, "d"), nodes: map[string]*nodes.Node{}}
	demo.plane.Install(t)
	demo.plane.Rights(t)
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	api, err := client.New(demo.plane.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	demo.api = api
	demo.disk = lab.Guest(t)
	demo.hosts.Start(t)
	lab.BeginLog(t, demo.hosts)
	for at, name := range demo.hosts.Names {
		node := nodes.Begin(t, demo.plane, demo.hosts, name, at)
		demo.nodes[name] = node
		node.Pod("operator", demo.operator(node, name))
		if at < 3 {
			node.Pod("scheduler", demo.scheduler(node, name))
		}
	}
	for _, name := range demo.hosts.Names {
		demo.isReady(name)
	}
	return demo
}

// pod is a manifest of one that belongs to a node, with folders of its own and of others.
func pod(t testing.TB, program string, arguments []string, folders ...string) string {
	text := fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: { name: %[1]s, namespace: dunlin-system }
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers:
    - name: one
      image: dunlin.dev/%[1]s:%[2]s
      imagePullPolicy: Never
      args: [ %[3]s ]
      volumeMounts:
`, program, nodes.Version(t), strings.Join(arguments, ", "))
	volumes := "  volumes:\n"
	for at, path := range folders {
		text += fmt.Sprintf("        - { name: v%d, mountPath: %s }\n", at, path)
		volumes += fmt.Sprintf("    - { name: v%d, hostPath: { path: %s } }\n", at, path)
	}
	return text + volumes
}

func (demo *demo) operator(node *nodes.Node, name string) string {
	kubeconfig := node.Keep(demo.plane.KubeconfigAs(demo.T, "operator-"+name, node.Address(), lab.OperatorAccount))
	return pod(demo.T, "dunlin-operator", []string{
		"--kubeconfig", kubeconfig, "--node", name, "--socket", demo.hosts.Socket(name), "--images", demo.disk, "--bridges", "br0",
		"--image", "dunlin.dev/dunlin-pause:" + nodes.Version(demo.T), "--beat", "1s", "--lost-after", "10s", "--grace", "5s",
	}, demo.hosts.Folder(name), node.Folder(), demo.disk)
}

func (demo *demo) scheduler(node *nodes.Node, name string) string {
	kubeconfig := node.Keep(demo.plane.KubeconfigAs(demo.T, "scheduler-"+name, node.Address(), lab.SchedulerAccount))
	config := lab.SchedulerConfig(demo.T, kubeconfig, lab.SchedulerArgs(name, []string{demo.hosts.Socket(name)}))
	return pod(demo.T, "dunlin-scheduler", []string{"--config", node.Write("scheduler.yaml", config), "--secure-port", `"0"`}, demo.hosts.Folder(name), node.Folder())
}

// isReady waits until kubelet and operator say so.
func (demo *demo) isReady(name string) {
	demo.Helper()
	testbed.Until(demo.T, "node "+name+" is ready", func() error {
		node, host := &v1.Node{}, &v1alpha1.DunlinHost{}
		if err := demo.api.Get(context.Background(), client.ObjectKey{Name: name}, node); err != nil {
			return fmt.Errorf("%w: %s", err, demo.nodes[name].Said())
		}
		if !slices.ContainsFunc(node.Status.Conditions, func(is v1.NodeCondition) bool { return is.Type == v1.NodeReady && is.Status == v1.ConditionTrue }) {
			return fmt.Errorf("%+v", node.Status.Conditions)
		}
		if err := demo.api.Get(context.Background(), client.ObjectKey{Name: name}, host); err != nil {
			return fmt.Errorf("%w: %s", err, demo.nodes[name].Said())
		}
		if !meta.IsStatusConditionTrue(host.Status.Conditions, operator.Ready) {
			return fmt.Errorf("%+v", host.Status)
		}
		return nil
	})
	demo.Logf("%s: node %s is ready", time.Now().UTC().Format("15:04:05"), name)
}

// until waits until the VM is so, and all its Pods run on their nodes.
func (demo *demo) until(what string, is func(*v1alpha1.ProtectedVM) bool) *v1alpha1.ProtectedVM {
	demo.Helper()
	vm := &v1alpha1.ProtectedVM{}
	testbed.Until(demo.T, what, func() error {
		if err := demo.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: "shop"}, vm); err != nil {
			return err
		}
		pods := &v1.PodList{}
		if err := demo.api.List(context.Background(), pods, client.InNamespace("default")); err != nil {
			return err
		}
		var on []string
		for _, pod := range pods.Items {
			if pod.Status.Phase == v1.PodRunning && pod.Status.PodIP != "" {
				on = append(on, pod.Spec.NodeName)
			}
		}
		copies := []string{vm.Status.Primary, vm.Status.Backup}
		if vm.Status.Standby != "" {
			copies = append(copies, vm.Status.Standby)
		}
		slices.Sort(on)
		slices.Sort(copies)
		if !is(vm) || !slices.Equal(on, copies) {
			return fmt.Errorf("Pods run on %v: %+v", on, vm.Status)
		}
		return nil
	})
	demo.Logf("%s: %s: primary %s, backup %s, witness %s", time.Now().UTC().Format("15:04:05"), what, vm.Status.Primary, vm.Status.Backup, vm.Status.Witness+", standby "+vm.Status.Standby)
	return vm
}

func isProtected(vm *v1alpha1.ProtectedVM) bool {
	return meta.IsStatusConditionTrue(vm.Status.Conditions, operator.Protected)
}

// shop makes a ProtectedVM that serves redis.
func (demo *demo) shop() {
	demo.Helper()
	image := func(name string) string { return filepath.Join(demo.disk, "default", name) }
	vm := &v1alpha1.ProtectedVM{
		ObjectMeta: metav1.ObjectMeta{Name: "shop", Namespace: "default"},
		Spec: v1alpha1.ProtectedVMSpec{Strength: 2, Policy: "dunlin", VM: v1alpha1.VM{
			MemoryMiB: 256, Accel: "tcg", Kernel: image("vmlinuz"), Initrd: image("initrd.img"), Append: os.Getenv("DUNLIN_GUEST_APPEND"),
			NICs: []v1alpha1.NIC{{MAC: "52:54:00:12:34:56", Bridge: "br0"}},
		}},
	}
	if err := demo.api.Create(context.Background(), vm); err != nil {
		demo.Fatal(err)
	}
}

// serves waits until the VM is protected, and has clients count on it.
func (demo *demo) serves() (*v1alpha1.ProtectedVM, *clients) {
	demo.Helper()
	demo.shop()
	vm := demo.until("it is protected", isProtected)
	counting := count(demo.T, demo.hosts.Client(demo.T), guest+":6379", 4)
	counting.until(demo.T, 200)
	return vm, counting
}

// dies has a node die as a machine does: kubelet, containerd, daemon, QEMU, operator and scheduler at once.
func (demo *demo) dies(name string) {
	demo.Helper()
	demo.nodes[name].Kill()
	demo.hosts.Kill(name)
	demo.Logf("%s: node %s is dead", time.Now().UTC().Format("15:04:05"), name)
}

// passes has the clients stop, who have lost nothing, and writes the last line of what 'cargo xtask k8s demo' says into the file that the variable names.
func (demo *demo) passes(counting *clients, what, variable string) {
	demo.Helper()
	lost, gap := counting.end(demo.T)
	if lost != 0 {
		demo.Errorf("%d answers were lost", lost)
	}
	demo.Logf("no client waited longer than %d ms", gap.Milliseconds())
	path := os.Getenv(variable)
	if path == "" {
		return
	}
	demo.Cleanup(func() {
		if demo.Failed() {
			return
		}
		line := fmt.Sprintf("k8s %s: PASS lost=%d gap_ms=%d\n", what, lost, gap.Milliseconds())
		if err := os.WriteFile(path, []byte(line), 0o644); err != nil {
			demo.Error(err)
		}
	})
}

// Everything on a node dies. Clients lose nothing, and the copy is made anew on the fourth node.
func TestANodeDiesAndClientsLoseNothing(t *testing.T) {
	demo := begin(t)
	before, clients := demo.serves()
	demo.dies(before.Status.Primary)
	after := demo.until("it is protected again", func(vm *v1alpha1.ProtectedVM) bool {
		status := vm.Status
		return isProtected(vm) && status.Primary == before.Status.Backup && status.Backup != before.Status.Primary && status.Backup != before.Status.Backup
	})
	if after.Status.LastFailOver == nil {
		t.Errorf("it says nothing of its fail-over: %+v", after.Status)
	}
	clients.until(t, 200)
	demo.passes(clients, "demo", "DUNLIN_DEMO_SAYS")
}
