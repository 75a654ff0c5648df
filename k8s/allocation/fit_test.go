package allocation

import (
	"fmt"
	"strings"
	"testing"
)

// unfitNow are the nodes that cannot run a task now.
func (world *world) unfitNow(task string) map[string]string {
	unfit := map[string]string{}
	for name, why := range world.unfit[task] {
		unfit[name] = why
	}
	for name := range world.silent {
		unfit[name] = "nothing is heard there"
	}
	return unfit
}

// limit makes some nodes unfit for a task that comes.
func (world *world) limit(task string) {
	if !world.misfits || world.random.Intn(3) == 0 {
		return
	}
	world.unfit[task] = map[string]string{}
	for _, name := range world.names() {
		if world.random.Intn(3) == 0 {
			world.unfit[task][name] = "it has not what this task needs"
			world.barred++
		}
	}
}

// silence has a node be heard no more, or again.
func (world *world) silence(node string) {
	if !world.misfits || world.random.Intn(20) > 0 {
		return
	}
	if world.silent[node] {
		delete(world.silent, node)
	} else {
		world.silent[node] = true
	}
}

// places looks that nothing that was agreed goes where it cannot run.
func (world *world) places(entry Entry, refusals []Refusal) error {
	refused := map[int]bool{}
	for _, refusal := range refusals {
		refused[refusal.Change] = true
	}
	for at, change := range entry.Changes {
		var task string
		var places []Place
		switch {
		case refused[at]:
		case change.Assign != nil:
			task, places = change.Assign.Name, change.Assign.Places
		case change.Move != nil:
			task, places = change.Move.Task, []Place{change.Move.Place}
		}
		for _, place := range places {
			if why := world.unfit[task][place.Node]; why != "" {
				return fmt.Errorf("a copy of %s was agreed onto %s: %s", task, place.Node, why)
			}
		}
	}
	return nil
}

// Not every node can run every task, and hosts fall silent and come back: nothing is ever agreed onto a node that lacks what the task needs, whoever dies, and all that
// could be placed on nodes that lack nothing is placed in the end, in zones of which some have no such node.
func TestNoCopyIsAgreedWhereItCannotRun(t *testing.T) {
	barred, silenced, served := 0, 0, 0
	run(t, 10, 5, func(world *world) {
		world.misfits = true
		world.pauses, world.controllerDeaths, world.nodeDeaths, world.failures = true, true, true, true
	}, func(world *world) error {
		if world.misplaced > 0 {
			return fmt.Errorf("%d binds were of nodes that cannot run the copy", world.misplaced)
		}
		barred, silenced, served = barred+world.barred, silenced+world.silenced, served+len(world.served)
		return nil
	})
	if barred == 0 || silenced == 0 || served == 0 {
		t.Errorf("%d nodes were closed to tasks, %d binds came to silent nodes, %d tasks had their copies: this tests nothing", barred, silenced, served)
	}
	t.Logf("%d nodes were closed to tasks, and %d binds came to nodes that had fallen silent", barred, silenced)
}

// A task is placed in the zones that have a node which can run it, and everybody judges it so; where there are too few, the reason is said once for all nodes that have it.
func TestATaskKeepsToNodesThatCanRunIt(t *testing.T) {
	agreed := agreedState(t, 0, one(10), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	for at, zone := range []string{"east", "east", "west", "west", "north", ""} {
		agreed.say(Change{SetNode: &Node{Name: fmt.Sprintf("node-%d", at), Zone: zone, Capacity: one(10)}})
	}
	unfit := map[string]string{"node-2": "it has no KVM", "node-3": "it has no KVM", "node-4": "it has no KVM", "node-5": "nothing is heard there"}
	agreed.planner.unfit = map[string]map[string]string{"critical": unfit, "third": unfit}
	for _, name := range []string{"critical", "plain"} {
		plan := agreed.planner.Plan(agreed.state, []Task{task(name, "shop", 2, one(1))}, nil, nil)
		if len(plan.Assignments) != 1 {
			t.Fatalf("%s: %+v", name, plan)
		}
		agreed.say(Change{Assign: &plan.Assignments[0]})
		var on []string
		for _, place := range plan.Assignments[0].Places {
			on = append(on, place.Node)
		}
		if got := strings.Join(on, " "); name == "critical" && got != "node-0 node-1" || name == "plain" && got != "node-2 node-4" {
			t.Errorf("%s is on %s", name, got)
		}
	}
	plan := agreed.planner.Plan(agreed.state, []Task{task("third", "shop", 3, one(1))}, nil, nil)
	const says = "have room for 1m CPU, 1 MiB memory, 1 MiB disk; not on node-2, node-3, node-4: it has no KVM; not on node-5: nothing is heard there"
	if why := plan.Waits["third"]; len(plan.Assignments) > 0 || why == nil || !strings.HasSuffix(why.Error(), says) {
		t.Errorf("%+v", plan)
	}
	if said := saysUnfit(map[string]string{"a": "x", "b": "x", "c": "x", "d": "x", "e": "x"}); said != "; not on a, b, c and 2 more: x" {
		t.Error(said)
	}
}

// A lost copy does not go where it cannot run, by what its own wish says, nor where its task cannot if it says nothing.
func TestALostCopyKeepsToNodesThatCanRunIt(t *testing.T) {
	for _, wishes := range []bool{false, true} {
		agreed := agreedState(t, 2, one(10), Application{Name: "shop", Quota: one(90), MostStrength: 2})
		agreed.place([]Task{task("critical", "shop", 2, one(1))})
		for at, name := range []string{"node-3", "node-4"} {
			agreed.say(Change{SetNode: &Node{Name: name, Capacity: one(int64(10 * (at + 1)))}})
		}
		lost := 0
		for at, copy := range agreed.state.Tasks["critical"].Copies {
			if copy.Node == "node-1" {
				lost = at
			}
		}
		agreed.say(Change{DropNode: "node-1"})
		unfit := map[string]string{"node-4": "it has no KVM"}
		agreed.planner.unfit = map[string]map[string]string{"critical": unfit}
		if wishes {
			agreed.planner.unfit = nil
			agreed.planner.wishes = []Wish{{"critical", lost, []string{"node-3", "node-4"}, unfit}}
		}
		plan := agreed.planner.Plan(agreed.state, nil, nil, nil)
		if len(plan.Moves) != 1 || plan.Moves[0].Node != "node-3" {
			t.Fatalf("%+v", plan)
		}
		unfit["node-3"] = "nothing is heard there"
		const says = "no other node where it may go has room for it; not on node-3: nothing is heard there; not on node-4: it has no KVM"
		if plan = agreed.planner.Plan(agreed.state, nil, nil, nil); len(plan.Moves) > 0 || plan.Waits["critical"] == nil || !strings.HasSuffix(plan.Waits["critical"].Error(), says) {
			t.Fatalf("%+v", plan)
		}
	}
}
