package controller_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/trial"
	"dunlin.dev/log"
)

// patience is the longest that anything may take, on a machine however busy.
const patience = 90 * time.Second

// timing is short enough for tests, and long enough for a busy machine.
var timing = allocation.Timing{Alive: 200 * time.Millisecond, Dead: 2 * time.Second}

var names = []string{"a", "b", "c"}

// program is dunlin-controller, built once.
var program struct {
	once sync.Once
	path string
	err  error
}

var buildFlags = []string{"build", "-buildvcs=false"}

func TestMain(m *testing.M) {
	code := m.Run()
	if program.path != "" {
		os.RemoveAll(filepath.Dir(program.path))
	}
	os.Exit(code)
}

func build(t *testing.T) string {
	program.once.Do(func() {
		dir, err := os.MkdirTemp("", "dunlin-controller-")
		if err != nil {
			program.err = err
			return
		}
		program.path = filepath.Join(dir, "dunlin-controller")
		arguments := append(buildFlags, "-o", program.path, "dunlin.dev/k8s/cmd/dunlin-controller")
		out, err := exec.Command("go", arguments...).CombinedOutput()
		if err != nil {
			program.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	if program.err != nil {
		t.Fatal(program.err)
	}
	return program.path
}

// lab is three real daemons with a shared log, a controller beside each as a process of its own, and a cluster for trying.
type lab struct {
	t       *testing.T
	dir     string
	server  *trial.Server
	client  *log.Client
	running map[string]*exec.Cmd
}

func newLab(t *testing.T) *lab {
	dunlin := os.Getenv("DUNLIN")
	if dunlin == "" {
		t.Fatal("DUNLIN has to name the dunlin program: DUNLIN=$PWD/../target/debug/dunlin go test ./...")
	}
	lab := &lab{t: t, dir: filepath.Join(t.TempDir(), "c"), server: trial.NewServer(), running: map[string]*exec.Cmd{}}
	arguments := []string{"init", lab.dir, "--cluster", "tripod", "--control", "control.sock"}
	for _, host := range names {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		// Kept until all have one, so that no two are the same.
		defer listener.Close()
		arguments = append(arguments, "--host", host+"="+listener.Addr().String())
	}
	if out, err := exec.Command(dunlin, arguments...).CombinedOutput(); err != nil {
		t.Fatalf("dunlin init: %v: %s", err, out)
	}
	listener, err := net.Listen("unix", filepath.Join(lab.dir, "trial.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() { _ = lab.server.Serve(listener) }()
	return lab
}

// begin starts everything, on so many nodes that are alike.
func (lab *lab) begin(nodes int, capacity allocation.Resources) {
	var sockets []string
	for _, host := range names {
		lab.daemon(host)
		sockets = append(sockets, lab.socket(host))
	}
	lab.client = log.New(sockets...)
	ctx, end := contextWithPatience()
	defer end()
	if err := lab.client.Create(ctx, "tripod", names...); err != nil {
		lab.t.Fatal(err)
	}
	for at := 0; at < nodes; at++ {
		lab.server.SetNode(allocation.Node{Name: fmt.Sprintf("node-%d", at), Capacity: capacity})
	}
	lab.server.SetApplication(allocation.Application{Name: "shop", Quota: capacity.Times(nodes), MostStrength: 3})
	for _, name := range names {
		lab.controller(name)
	}
}

// daemon starts a host's.
func (lab *lab) daemon(host string) {
	lab.start("daemon "+host, "ready:", os.Getenv("DUNLIN"), "host", filepath.Join(lab.dir, host, "host.toml"))
}

func contextWithPatience() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

func (lab *lab) socket(host string) string { return filepath.Join(lab.dir, host, "control.sock") }

// controller starts one.
func (lab *lab) controller(name string) {
	lab.start("controller "+name, "has read what is agreed", build(lab.t), "--name", name, "--socket", lab.socket(name),
		"--trial", filepath.Join(lab.dir, "trial.sock"), "--alive", timing.Alive.String(), "--dead", timing.Dead.String())
}

// start runs a program until the test ends, and waits until it says that it is ready.
func (lab *lab) start(name, ready, program string, arguments ...string) {
	command := exec.Command(program, arguments...)
	command.Stderr = os.Stderr
	out, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		lab.t.Fatal(err)
	}
	lab.running[name] = command
	lab.t.Cleanup(func() { lab.kill(name) })
	said, once := make(chan struct{}), sync.Once{}
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if testing.Verbose() {
				fmt.Println(lines.Text())
			}
			if strings.Contains(lines.Text(), ready) {
				once.Do(func() { close(said) })
			}
		}
	}()
	select {
	case <-said:
	case <-time.After(patience):
		lab.t.Fatalf("%s is not ready", name)
	}
}

// kill is SIGKILL.
func (lab *lab) kill(name string) {
	if command := lab.running[name]; command != nil {
		delete(lab.running, name)
		_ = command.Process.Kill()
		_ = command.Wait()
	}
}

func (lab *lab) signal(name string, signal syscall.Signal) {
	if err := lab.running[name].Process.Signal(signal); err != nil {
		lab.t.Fatal(err)
	}
}

// until reads the log from its beginning until what is agreed is so, and returns it.
func (lab *lab) until(what string, is func(*allocation.State, allocation.Entry) bool) *allocation.State {
	lab.t.Helper()
	ctx, end := contextWithPatience()
	defer end()
	state := allocation.NewState()
	enough := fmt.Errorf("enough")
	err := enough
	for next := uint64(1); ; {
		err = lab.client.Read(ctx, "tripod", next, true, func(kept log.Entry) error {
			next = kept.Index + 1
			entry, err := allocation.Decode(kept.Data)
			if err != nil {
				return err
			}
			state.Apply(kept.Index, entry)
			if err := state.Check(); err != nil {
				return err
			}
			if is(state, entry) {
				return enough
			}
			return nil
		})
		if err == enough {
			return state
		}
		if ctx.Err() != nil {
			lab.t.Fatalf("%s: it does not come to that: %s", what, state.Encode())
		}
	}
}

// check looks for what must never be.
func (lab *lab) check(state trial.State) {
	lab.t.Helper()
	type at struct{ task, node string }
	seen := map[at]bool{}
	copies := map[string]map[int]bool{}
	for _, binding := range state.Bound {
		place := at{binding.Task, binding.Node}
		if seen[place] {
			lab.t.Fatalf("two copies of %s on %s", binding.Task, binding.Node)
		}
		seen[place] = true
		if copies[binding.Task] == nil {
			copies[binding.Task] = map[int]bool{}
		}
		if copies[binding.Task][binding.Copy] {
			lab.t.Fatalf("copy %d of %s is there twice", binding.Copy, binding.Task)
		}
		copies[binding.Task][binding.Copy] = true
	}
}

// settled waits until every wanted task has all its copies and what is agreed says the same.
func (lab *lab) settled() trial.State {
	lab.t.Helper()
	state, ok := lab.server.Until(patience, func(state trial.State) bool {
		wanted := 0
		for _, task := range state.Tasks {
			wanted += task.Strength
		}
		return len(state.Bound) == wanted
	})
	if !ok {
		lab.t.Fatalf("not all copies are bound, or too many: %+v", state)
	}
	lab.check(state)
	lab.until("what is bound is agreed", func(agreed *allocation.State, _ allocation.Entry) bool {
		for _, binding := range state.Bound {
			task := agreed.Tasks[binding.Task]
			if task == nil {
				return false
			}
			copy := task.Copies[binding.Copy]
			if copy.Phase != allocation.Bound || copy.Node != binding.Node || copy.Ticket != binding.Ticket {
				return false
			}
		}
		return len(agreed.Tasks) == len(state.Tasks)
	})
	return state
}
