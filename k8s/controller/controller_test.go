package controller_test

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/trial"
	"dunlin.dev/log/testbed"
)

var capacity = allocation.Resources{MilliCPU: 4000, MemoryMiB: 4096, DiskMiB: 4096}

func copies(strength int, name string) allocation.Task {
	return allocation.Task{Name: name, Application: "shop", Strength: strength, Demand: allocation.Resources{MilliCPU: 500, MemoryMiB: 512}}
}

func TestEachControllerBindsItsOwnCopies(t *testing.T) {
	lab := newLab(t)
	lab.begin(4, capacity)
	lab.server.Submit(copies(3, "critical"))
	lab.server.Submit(copies(1, "single"))
	lab.server.Submit(copies(2, "pair"))
	state := lab.settled()
	by := map[string]bool{}
	for _, happened := range state.Happened {
		// Where another one took the office meanwhile, what came late from before is rightly refused.
		if happened.Outcome == allocation.Refused && lab.offices() == 1 {
			t.Errorf("refused: %+v", happened)
		}
		if happened.Binding.Task == "critical" {
			by[happened.By] = true
		}
	}
	// On a busy machine one may be silent for so long that another one gets its copy.
	if len(by) != 3 && !lab.died("") {
		t.Fatalf("not each of three controllers has bound one of three copies: %v", by)
	}
	lab.server.End("critical")
	lab.settled()
}

// The leading controller has had an assignment agreed, and is killed before anything of it is bound.
func TestTheLeaderIsKilledBetweenAgreementAndBind(t *testing.T) {
	lab := newLab(t)
	lab.begin(4, capacity)
	lab.server.Hold(func(string, allocation.Binding) bool { return true })
	critical := copies(3, "critical")
	lab.server.Submit(critical)
	agreed := lab.until("the assignment", func(state *allocation.State, _ allocation.Entry) bool { return state.Tasks["critical"] != nil })
	leader := agreed.Office.Leader
	// Its own bind is on its way.
	waits := func(state trial.State) bool {
		for _, waiting := range state.Waiting {
			if waiting.By == leader {
				return true
			}
		}
		return false
	}
	if state, ok := lab.server.Until(patience, waits); !ok {
		t.Fatalf("%+v", state.Waiting)
	}
	lab.controllers[leader].Kill()
	lab.server.Hold(nil)
	state := lab.settled()

	// The places are those that were agreed; the leader's copy was bound by another controller, for a new leader had that agreed.
	for at, copy := range agreed.Tasks["critical"].Copies {
		binding := allocation.Binding{Task: "critical", Copy: at, Node: copy.Node, Ticket: copy.Ticket}
		by := ""
		for _, happened := range state.Happened {
			if happened.Binding == binding && happened.Outcome == allocation.Done && by == "" {
				by = happened.By
			}
		}
		if by == "" {
			t.Fatalf("%+v was agreed, and bound are %+v", binding, state.Bound)
		}
		// On a busy machine its own controller may be silent for so long that another one gets it.
		if own := copy.Controller != leader; own && by != copy.Controller && !lab.died(leader) {
			t.Fatalf("copy %d is of controller %s, and %s bound it", at, copy.Controller, by)
		}
	}
	after := lab.until("another leader", func(state *allocation.State, _ allocation.Entry) bool {
		return state.Office.Number > agreed.Office.Number && !state.Controllers[leader]
	})
	if after.Office.Leader == leader {
		t.Fatalf("%+v after %+v", after.Office, agreed.Office)
	}
	// It comes back, and has a part again.
	lab.controller(leader)
	lab.server.Submit(copies(3, "next"))
	lab.settled()
}

// The leader stands still with binds on their way; meanwhile others lead, its copies are bound by others, and a node dies. Then it goes on.
func TestALeaderThatStandsStillDoesNoHarm(t *testing.T) {
	lab := newLab(t)
	lab.begin(5, capacity)
	lab.server.Submit(copies(3, "before"))
	lab.settled()
	// All are held until it is known who leads.
	lab.server.Hold(func(string, allocation.Binding) bool { return true })
	critical, single := copies(3, "critical"), copies(1, "single")
	lab.server.Submit(single)
	lab.server.Submit(critical)
	// The other one is agreed when it is bound.
	agreed := lab.until("the assignment", func(state *allocation.State, _ allocation.Entry) bool { return state.Tasks["critical"] != nil })
	leader := agreed.Office.Leader
	lab.server.Hold(func(by string, _ allocation.Binding) bool { return by == leader })
	waits := func(state trial.State) bool {
		count := 0
		for _, waiting := range state.Waiting {
			if waiting.By == leader {
				count++
			}
		}
		return count >= 2
	}
	if state, ok := lab.server.Until(patience, waits); !ok {
		t.Fatalf("%+v", state.Waiting)
	}
	lab.controllers[leader].Signal(t, syscall.SIGSTOP)
	others := lab.until("another leader has its copies", func(state *allocation.State, _ allocation.Entry) bool {
		task := state.Tasks["critical"]
		if task == nil || state.Office.Leader == leader || state.Tasks["single"] == nil {
			return false
		}
		for _, copy := range task.Copies {
			if copy.Phase != allocation.Bound || copy.Controller == leader {
				return false
			}
		}
		return true
	})
	// What it wanted to bind gets another place: its node dies, and comes back.
	var lost allocation.Copy
	for _, copy := range agreed.Tasks["critical"].Copies {
		if copy.Controller == leader {
			lost = copy
		}
	}
	node := *others.Nodes[lost.Node]
	lab.server.DropNode(node.Name)
	lab.until("the lost copy is elsewhere", func(state *allocation.State, _ allocation.Entry) bool {
		task := state.Tasks["critical"]
		if task == nil || state.Nodes[node.Name] != nil {
			return false
		}
		for _, copy := range task.Copies {
			if copy.Phase != allocation.Bound {
				return false
			}
		}
		return state.Office.Number > agreed.Office.Number
	})
	lab.server.SetNode(node)
	before := lab.settled()

	lab.server.Hold(nil)
	lab.controllers[leader].Signal(t, syscall.SIGCONT)
	number := lab.until("it says something again", func(state *allocation.State, entry allocation.Entry) bool {
		return entry.By == leader && state.Office.Leader != leader && state.Office.Number > agreed.Office.Number && state.Nodes[node.Name] != nil
	}).Office.Number
	// It has read that it leads no more, and binds what it is told to from now on.
	lab.server.Submit(copies(3, "after"))
	after := lab.settled()
	late := 0
	for _, happened := range after.Happened[len(before.Happened):] {
		if happened.By == leader && happened.Bind && happened.Binding.Task != "after" {
			late++
			if happened.Outcome == allocation.Done {
				t.Errorf("its late bind was taken: %+v", happened)
			}
		}
	}
	t.Logf("%d late binds of a controller that stood still, all refused; the office is %d, it was %d", late, number, agreed.Office.Number)
	there := map[allocation.Binding]bool{}
	for _, binding := range after.Bound {
		there[binding] = true
	}
	for _, binding := range before.Bound {
		if !there[binding] {
			t.Errorf("%+v was bound before it went on, and is not now", binding)
		}
	}
}

// A daemon dies with the log's leader, and its controller goes on when the daemon is back.
func TestTheLogsLeaderIsKilled(t *testing.T) {
	lab := newLab(t)
	lab.begin(4, capacity)
	lab.server.Submit(copies(3, "first"))
	lab.settled()
	ctx, end := contextWithPatience()
	defer end()
	var leader string
	testbed.Until(t, "one leads the log", func() error {
		status, err := lab.client.Status(ctx, "tripod")
		if leader = status.Leader; err != nil || leader == "" {
			return fmt.Errorf("%+v, %v", status, err)
		}
		return nil
	})
	lab.hosts.Kill(leader)
	for at := 0; at < 3; at++ {
		lab.server.Submit(copies(2, fmt.Sprintf("pair-%d", at)))
	}
	lab.settled()
	lab.hosts.Start(t, leader)
	lab.server.Submit(copies(3, "last"))
	lab.settled()
}

func TestMistakesGetOneLine(t *testing.T) {
	program := build(t)
	for _, mistake := range []struct {
		arguments []string
		why       string
	}{
		{nil, "it needs --name and --trial"},
		{[]string{"--name", "a"}, "it needs --name and --trial"},
		{[]string{"--name", "a", "--trial", "/x", "more"}, "it needs"},
		{[]string{"--name", "a", "--trial", "/x", "--dead", "1ms"}, "--dead at least twice"},
	} {
		out, err := exec.Command(program, mistake.arguments...).CombinedOutput()
		said := string(out)
		if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 2 || !strings.Contains(said, mistake.why) || strings.Count(said, "\n") != 1 {
			t.Errorf("%v: %v, %s", mistake.arguments, err, said)
		}
	}
}
