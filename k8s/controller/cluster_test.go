package controller_test

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/trial"
	"dunlin.dev/log"
	"dunlin.dev/log/testbed"
)

// patience is the longest that anything may take, on a machine however busy.
const patience = testbed.Patience

// timing is short enough for tests, and long enough for a busy machine.
var timing = allocation.Timing{Alive: 200 * time.Millisecond, Dead: 5 * time.Second}

var buildFlags []string

func TestMain(m *testing.M) { testbed.Main(m) }

func build(t *testing.T) string {
	return testbed.Build(t, "dunlin.dev/k8s/cmd/dunlin-controller", buildFlags...)
}

// lab is three real daemons with a shared log, a controller beside each as a process of its own, and a cluster for trying.
type lab struct {
	t           *testing.T
	hosts       *testbed.Hosts
	server      *trial.Server
	client      *log.Client
	controllers map[string]*testbed.Process
}

func newLab(t *testing.T) *lab {
	lab := &lab{t: t, hosts: testbed.OnLoopback(t), server: trial.NewServer(), controllers: map[string]*testbed.Process{}}
	listener, err := net.Listen("unix", lab.trial())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() { _ = lab.server.Serve(listener) }()
	return lab
}

// trial is where the cluster for trying listens.
func (lab *lab) trial() string { return filepath.Join(lab.hosts.Folder("a"), "trial.sock") }

// begin starts everything, on so many nodes that are alike.
func (lab *lab) begin(nodes int, capacity allocation.Resources) {
	lab.hosts.Start(lab.t)
	lab.client = log.New(lab.hosts.Sockets("a")...)
	ctx, end := contextWithPatience()
	defer end()
	testbed.CreateLog(lab.t, ctx, lab.client, "tripod", lab.hosts.Names...)
	for at := 0; at < nodes; at++ {
		lab.server.SetNode(allocation.Node{Name: fmt.Sprintf("node-%d", at), Capacity: capacity})
	}
	lab.server.SetApplication(allocation.Application{Name: "shop", Quota: capacity.Times(nodes), MostStrength: 3})
	for _, name := range lab.hosts.Names {
		lab.controller(name)
	}
}

func contextWithPatience() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

// controller starts one, and waits until it has read the log.
func (lab *lab) controller(name string) {
	lab.t.Helper()
	process, err := testbed.Start(lab.t, nil, build(lab.t), "--name", name, "--socket", lab.hosts.Socket(name),
		"--trial", lab.trial(), "--alive", timing.Alive.String(), "--dead", timing.Dead.String())
	if err != nil {
		lab.t.Fatal(err)
	}
	lab.controllers[name] = process
	process.Until(lab.t, "has read what is agreed")
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

// agreed is what the log says now; each is told what it said after every entry.
func (lab *lab) agreed(each func(*allocation.State)) *allocation.State {
	lab.t.Helper()
	ctx, end := contextWithPatience()
	defer end()
	state := allocation.NewState()
	err := lab.client.Read(ctx, "tripod", 1, false, func(kept log.Entry) error {
		entry, err := allocation.Decode(kept.Data)
		if err != nil {
			return err
		}
		state.Apply(kept.Index, entry)
		each(state)
		return state.Check()
	})
	if err != nil {
		lab.t.Fatalf("what is agreed: %v", err)
	}
	return state
}

// died says whether a controller has counted as dead until now, beside the one that is named.
func (lab *lab) died(beside string) (died bool) {
	lab.t.Helper()
	lab.agreed(func(state *allocation.State) {
		for name, lives := range state.Controllers {
			died = died || !lives && name != beside
		}
	})
	return died
}

// offices is how often somebody has taken the office until now.
func (lab *lab) offices() int {
	lab.t.Helper()
	offices := map[uint64]bool{}
	lab.agreed(func(state *allocation.State) {
		if state.Office.Leader != "" {
			offices[state.Office.Number] = true
		}
	})
	return len(offices)
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
