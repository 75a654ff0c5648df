// Package nodes is real nodes of Kubernetes for tests: a kubelet and a containerd for each host of a testbed, in the host's network and in processes and mounts of its
// own, so that SIGKILL to the first process ends all that the node has.
//
// Programs lie in folders that DUNLIN_KUBE_TOOLS (kubelet) and DUNLIN_CONTAINERD (containerd, runc, CNI) name, and images in DUNLIN_IMAGES; 'cargo xtask k8s demo' makes all of it.
// Not here: what the nodes run.
package nodes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

// again is when something that nothing tells of is asked again.
const again = 100 * time.Millisecond

// Node is one that runs until the test ends.
type Node struct {
	t                   testing.TB
	name, dir, tools    string
	first               *testbed.Process
	inside              []string
	containerd, kubelet *testbed.Process
	socket, endpoint    string
}

// Folder is where its files lie; Pods of the node may be given it.
func (node *Node) Folder() string { return node.dir }

// Address is the API server's, for whatever runs on the node.
func (node *Node) Address() string { return "https://" + node.endpoint }

// Pod has the kubelet run one that belongs to the node.
func (node *Node) Pod(name, manifest string) {
	node.t.Helper()
	// The kubelet looks at whatever is in that folder, so the file is whole when it comes there.
	half := node.Write(name+".half", manifest)
	if err := os.Rename(half, filepath.Join(node.dir, "manifests", name+".yaml")); err != nil {
		node.t.Fatal(err)
	}
}

// Keep copies a file into the node's folder, and returns its path there.
func (node *Node) Keep(path string) string {
	node.t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		node.t.Fatal(err)
	}
	return node.Write(filepath.Base(path), string(data))
}

// Write makes a file in the node's folder, and returns its path.
func (node *Node) Write(name, text string) string {
	node.t.Helper()
	path := filepath.Join(node.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		node.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		node.t.Fatal(err)
	}
	return path
}

func setting(t testing.TB, variable string) string {
	t.Helper()
	value := os.Getenv(variable)
	if value == "" {
		t.Fatalf("%s is not set: 'cargo xtask k8s demo' does all of it", variable)
	}
	return value
}

// Begin starts a node on a host, the one at this place in the list, with all images that there are.
func Begin(t testing.TB, plane *lab.Plane, hosts *testbed.Hosts, name string, at int) *Node {
	t.Helper()
	// A socket's path is short, whatever a test is called; and whoever runs in a Pod may look into the folder.
	dir, err := os.MkdirTemp("/var/tmp", "dunlin-node-")
	if err != nil {
		t.Fatal(err)
	}
	// What a node has mounted goes with its namespace.
	t.Cleanup(func() {
		os.RemoveAll(dir)
		sweep(filepath.Base(dir))
	})
	node := &Node{t: t, name: name, dir: dir, tools: setting(t, "DUNLIN_CONTAINERD"), socket: filepath.Join(dir, "s")}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	node.endpoint = forward(t, hosts.Namespace(name), strings.TrimPrefix(plane.Address(), "https://"))
	node.begin(hosts)
	node.runContainerd(at)
	images, err := filepath.Glob(filepath.Join(setting(t, "DUNLIN_IMAGES"), "*.tar"))
	if err != nil || len(images) == 0 {
		t.Fatalf("no images: %v", err)
	}
	for _, image := range images {
		node.must("ctr", "--address", node.socket, "--namespace", "k8s.io", "images", "import", image)
	}
	if err := os.Mkdir(filepath.Join(dir, "manifests"), 0o755); err != nil {
		t.Fatal(err)
	}
	node.runKubelet(plane, hosts.Address(name))
	return node
}

// begin starts the node's first process, in whose namespaces all others are: it ends nothing but itself, and takes those that have lost their parent.
func (node *Node) begin(hosts *testbed.Hosts) {
	t := node.t
	outside := []string{"nsenter", "--net=/run/netns/" + hosts.Namespace(node.name), "--"}
	command := append(outside, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL", "--", filepath.Join(setting(t, "DUNLIN_IMAGES"), "bin", "dunlin-pause"))
	process, err := testbed.Start(t, nil, command[0], command[1:]...)
	if err != nil {
		t.Fatal(err)
	}
	node.first = process
	var first int
	testbed.Until(t, "the node's first process", func() error {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", process.Pid()))
		if err != nil {
			return err
		}
		first, err = strconv.Atoi(strings.TrimSpace(string(children)))
		if err != nil {
			return err
		}
		// It is there before it is what it becomes: with mounts of its own.
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", first))
		if err != nil || strings.TrimSpace(string(name)) != "dunlin-pause" {
			return fmt.Errorf("it is %s, %v", name, err)
		}
		return nil
	})
	node.inside = []string{"nsenter", fmt.Sprintf("--target=%d", first), "--net", "--mount", "--pid", "--"}
}

func (node *Node) environment() string {
	return fmt.Sprintf("PATH=%s:%s:%s", filepath.Join(node.tools, "bin"), filepath.Join(node.tools, "sbin"), os.Getenv("PATH"))
}

// run starts a program on the node.
func (node *Node) run(program string, arguments ...string) *testbed.Process {
	node.t.Helper()
	command := append(append(append([]string(nil), node.inside...), program), arguments...)
	process, err := testbed.Start(node.t, []string{node.environment()}, command[0], command[1:]...)
	if err != nil {
		node.t.Fatal(err)
	}
	// Before what entered the node is ended: what it runs there goes on without it, and holds its output open.
	node.t.Cleanup(node.first.Kill)
	return process
}

// try runs a program of containerd's on the node, and returns what it says.
func (node *Node) try(program string, arguments ...string) (string, error) {
	command := append(append(append([]string(nil), node.inside...), filepath.Join(node.tools, "bin", program)), arguments...)
	run := exec.Command("timeout", append([]string{fmt.Sprint(int(testbed.Patience.Seconds()))}, command...)...)
	run.Env = append(os.Environ(), node.environment())
	out, err := run.CombinedOutput()
	return string(out), err
}

func (node *Node) must(program string, arguments ...string) {
	node.t.Helper()
	if out, err := node.try(program, arguments...); err != nil {
		node.t.Fatalf("%s %s: %v: %s", program, strings.Join(arguments, " "), err, out)
	}
}

func (node *Node) runContainerd(at int) {
	node.t.Helper()
	node.Write("cni/10-pods.conflist", fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true, "ipMasq": false,
 "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.78.%d.0/24"}]]}}]}`, filepath.Join(node.dir, "addresses"), at+1))
	config := node.Write("containerd.toml", fmt.Sprintf(`version = 2
root = "%[1]s/containerd/root"
state = "%[1]s/containerd/state"
[grpc]
address = "%[1]s/s"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "dunlin.dev/dunlin-pause:%[2]s"
netns_mounts_under_state_dir = true
# A machine that is a container itself may not lower it.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "%[3]s/lib/cni"
conf_dir = "%[1]s/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
`, node.dir, Version(node.t), node.tools))
	node.containerd = node.run(filepath.Join(node.tools, "bin", "containerd"), "--config", config)
	node.answers(node.containerd)
}

// answers waits until containerd does.
func (node *Node) answers(containerd *testbed.Process) {
	node.t.Helper()
	late := time.After(testbed.Patience)
	for {
		said, err := node.try("ctr", "--address", node.socket, "version")
		if err == nil {
			return
		}
		select {
		case <-containerd.Ended:
			node.t.Fatalf("containerd has ended: %s", containerd.Said())
		case <-late:
			node.t.Fatalf("containerd does not answer: %s: %s", said, containerd.Said())
		case <-time.After(again):
		}
	}
}

func (node *Node) runKubelet(plane *lab.Plane, address string) {
	node.t.Helper()
	config := node.Write("kubelet.yaml", fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://%[1]s/s
staticPodPath: %[1]s/manifests
podLogsDir: %[1]s/logs
volumePluginDir: %[1]s/plugins
address: 127.0.0.1
readOnlyPort: 0
authentication: { anonymous: { enabled: true }, webhook: { enabled: false } }
authorization: { mode: AlwaysAllow }
cgroupDriver: cgroupfs
cgroupsPerQOS: false
cgroupRoot: /%[2]s
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
localStorageCapacityIsolation: false
nodeStatusUpdateFrequency: 1s
nodeLeaseDurationSeconds: 4
evictionHard: { memory.available: 1Mi }
`, node.dir, filepath.Base(node.dir)))
	keepTunables(node.t)
	node.kubelet = node.run(lab.Tool(node.t, "kubelet"), "--config", config, "--kubeconfig", plane.Kubeconfig(node.t, "kubelet-"+node.name, node.Address()),
		"--hostname-override", node.name, "--node-ip", address, "--root-dir", filepath.Join(node.dir, "kubelet"), "--cert-dir", filepath.Join(node.dir, "certificates"))
}

// Runs are the containers with this image that run on the node; a Pod's own, which hold its network, are not among them. One that has ended is the kubelet's to sweep away.
func (node *Node) Runs(image string) (ids []string) {
	node.t.Helper()
	list := func(arguments ...string) []string {
		node.t.Helper()
		said, err := node.try("ctr", append([]string{"--address", node.socket, "--namespace", "k8s.io"}, arguments...)...)
		if err != nil {
			node.t.Fatalf("%v: %v: %s", arguments, err, said)
		}
		return strings.Split(said, "\n")[1:]
	}
	made := map[string]bool{}
	for _, line := range list("containers", "list", `labels."io.cri-containerd.kind"==container`) {
		if words := strings.Fields(line); len(words) > 1 && strings.HasPrefix(words[1], image+":") {
			made[words[0]] = true
		}
	}
	for _, line := range list("tasks", "list") {
		if words := strings.Fields(line); len(words) == 3 && made[words[0]] && words[2] == "RUNNING" {
			ids = append(ids, words[0])
		}
	}
	return ids
}

// Kill is SIGKILL to everything that the node has, at once: kubelet, containerd, and whatever runs in its Pods.
func (node *Node) Kill() { node.first.Kill() }

// Said is the last that kubelet and containerd have said.
func (node *Node) Said() string {
	var last []string
	for _, process := range []*testbed.Process{node.kubelet, node.containerd} {
		said := process.Said()
		last = append(last, said[max(0, len(said)-4000):])
	}
	return strings.Join(last, "\n")
}

// Version is the tag of the images.
func Version(t testing.TB) string {
	t.Helper()
	return setting(t, "DUNLIN_VERSION")
}
