package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// patience is the longest that anything may take, on a machine however busy.
const patience = 120 * time.Second

// again is when something that nothing tells of is asked again.
const again = 100 * time.Millisecond

// namespace is what containerd keeps the containers in, and the control groups' folder.
const namespace = "dunlin-images-test"

// node is a containerd with all its files in a folder of its own.
type node struct {
	t            *testing.T
	tools        string
	socket, path string
}

func fromEnvironment(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("%s is not set: 'cargo xtask k8s images --check' does all of it", name)
	}
	return value
}

// begin starts one; its programs are unpacked, and not installed.
func begin(t *testing.T) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("containers are made by root: run the test with sudo")
	}
	tools := fromEnvironment(t, "DUNLIN_CONTAINERD")
	// A socket's path is short, whatever a test is called.
	folder, err := os.MkdirTemp("", "dunlin-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	node := &node{
		t: t, tools: tools, socket: filepath.Join(folder, "s"),
		path: fmt.Sprintf("PATH=%s:%s:%s", filepath.Join(tools, "bin"), filepath.Join(tools, "sbin"), os.Getenv("PATH")),
	}
	config := fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = %q
[ttrpc]
address = %q
`, filepath.Join(folder, "root"), filepath.Join(folder, "state"), node.socket, node.socket+".ttrpc")
	file := filepath.Join(folder, "config.toml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	said, err := os.Create(filepath.Join(folder, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	containerd := exec.Command(filepath.Join(tools, "bin", "containerd"), "--config", file)
	containerd.Env = append(os.Environ(), node.path)
	containerd.Stdout, containerd.Stderr = said, said
	// It does not outlive a test that is killed.
	containerd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := containerd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = containerd.Wait() // that it ended is what counts
		close(ended)
	}()
	t.Cleanup(func() {
		_ = containerd.Process.Signal(syscall.SIGTERM)
		<-ended
		for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
			folders, _ := filepath.Glob(pattern + namespace)
			for _, folder := range folders {
				_ = os.Remove(folder) // one of another run may be in use
			}
		}
	})
	late := time.After(patience)
	for {
		if _, err := node.ctr("version"); err == nil {
			return node
		}
		select {
		case <-ended:
			text, _ := os.ReadFile(said.Name())
			t.Fatalf("containerd has ended: %s", text)
		case <-late:
			text, _ := os.ReadFile(said.Name())
			t.Fatalf("containerd does not answer: %s", text)
		case <-time.After(again):
		}
	}
}

// ctr is containerd's own command.
func (node *node) ctr(arguments ...string) (string, error) {
	ctx, end := context.WithTimeout(context.Background(), patience)
	defer end()
	ctr := exec.CommandContext(ctx, filepath.Join(node.tools, "bin", "ctr"), append([]string{"--address", node.socket, "--namespace", namespace}, arguments...)...)
	ctr.Env = append(os.Environ(), node.path)
	out, err := ctr.CombinedOutput()
	return string(out), err
}

func (node *node) must(arguments ...string) string {
	node.t.Helper()
	out, err := node.ctr(arguments...)
	if err != nil {
		node.t.Fatalf("ctr %s: %v: %s", strings.Join(arguments, " "), err, out)
	}
	return out
}

// pull has an image imported, and returns its name.
func (node *node) pull(images, program string) string {
	node.t.Helper()
	said := node.must("images", "import", filepath.Join(images, program+".tar"))
	for _, word := range strings.Fields(said) {
		if strings.HasPrefix(word, project+"/"+program+":") {
			return word
		}
	}
	node.t.Fatalf("%s is not known by its name: %s", program, said)
	return ""
}

func TestContainerdRunsThem(t *testing.T) {
	images, node := fromEnvironment(t, "DUNLIN_IMAGES"), begin(t)
	for _, image := range []struct{ program, argument, says string }{
		{"dunlin-operator", "--version", "dunlin-operator "},
		{"dunlin-scheduler", "--version", "Kubernetes v1.34.2-dunlin."},
	} {
		out := node.must("run", "--rm", node.pull(images, image.program), image.program, "/"+image.program, image.argument)
		if !strings.HasPrefix(out, image.says) {
			t.Errorf("%s %s says %q", image.program, image.argument, out)
		}
	}
	node.pauses(images)
}

// pauses has one run that waits, and tells it to end.
func (node *node) pauses(images string) {
	const id = "waits"
	name := node.pull(images, "dunlin-pause")
	node.must("run", "--detach", name, id)
	node.t.Cleanup(func() {
		// One that has ended as it should is not there any more.
		_, _ = node.ctr("tasks", "delete", "--force", id)
	})
	if out := node.must("tasks", "list"); !strings.Contains(out, "RUNNING") {
		node.t.Fatalf("it does not wait: %s", out)
	}
	node.must("tasks", "kill", "--signal", "SIGTERM", id)
	late := time.Now().Add(patience)
	for out := node.must("tasks", "list"); !strings.Contains(out, "STOPPED"); out = node.must("tasks", "list") {
		if time.Now().After(late) {
			node.t.Fatalf("it does not end: %s", out)
		}
		time.Sleep(again)
	}
	// Fails where its exit code is not 0.
	node.must("tasks", "delete", id)
	node.must("containers", "delete", id)
}
