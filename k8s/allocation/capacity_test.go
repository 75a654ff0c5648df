package allocation

import (
	"reflect"
	"testing"
	"time"
)

// proposed is what a leading controller puts into its next entries, by this look, until it has nothing more to say. Everything that it says is agreed, and
// nothing of it is refused.
func proposed(t *testing.T, controller *Controller, now time.Duration, cluster Cluster) (changes []Change) {
	t.Helper()
	controller.Saw(now, controller.Applied(), cluster)
	for said := true; said; {
		said = false
		for _, effect := range controller.Step(now) {
			if effect.Propose == nil {
				continue
			}
			said = len(effect.Propose.Changes) > 0
			changes = append(changes, effect.Propose.Changes...)
			if refusals := controller.Agreed(now, controller.Applied()+1, *effect.Propose); len(refusals) > 0 {
				t.Fatalf("refused is %v", refusals)
			}
		}
	}
	return changes
}

func nodesOf(changes []Change) map[string]int64 {
	nodes := map[string]int64{}
	for _, change := range changes {
		if change.SetNode != nil {
			nodes[change.SetNode.Name] = change.SetNode.Capacity.MilliCPU
		}
	}
	return nodes
}

// What ordinary Pods leave of the nodes changes with each of them. Nobody agrees on that before a copy needs it (S3), and the copy does not wait for it either.
func TestWhatNodesHaveIsAgreedWithThePlacesThatNeedIt(t *testing.T) {
	cluster := Cluster{
		Nodes:        []Node{{"node-0", "", one(10)}, {"node-1", "", one(10)}, {"node-2", "", one(10)}, {"node-3", "", one(10)}},
		Applications: []Application{{Name: "shop", Quota: one(40), MostStrength: 2}},
	}
	controller := leading(cluster)
	seen := func(capacities ...int64) Cluster {
		now := cluster
		now.Nodes = nil
		for at, node := range cluster.Nodes {
			node.Capacity = one(capacities[at])
			now.Nodes = append(now.Nodes, node)
		}
		return now
	}
	for round := int64(1); round < 5; round++ {
		if changes := proposed(t, controller, time.Duration(round), seen(10-round, 9-round, 8-round, 7-round)); len(changes) > 0 {
			t.Fatalf("agreed is %+v", changes)
		}
	}
	// As soon as a task comes it is placed, by what is there, in one entry; and by that everybody judges it.
	now := seen(9, 3, 8, 1)
	now.Tasks = []Task{task("critical", "shop", 2, one(2))}
	changes := proposed(t, controller, 6, now)
	if nodes := nodesOf(changes); len(changes) != 3 || len(nodes) != 2 || nodes["node-0"] != 9 || nodes["node-1"] != 3 || changes[2].Assign == nil {
		t.Fatalf("agreed is %+v", changes)
	}
	// Room that is new is used at once too.
	now = seen(0, 20, 0, 30)
	now.Tasks = append(now.Tasks, task("critical", "shop", 2, one(2)), task("large", "shop", 2, one(12)))
	if nodes := nodesOf(proposed(t, controller, 7, now)); controller.State().Tasks["large"] == nil || nodes["node-1"] != 20 || nodes["node-3"] != 30 {
		t.Fatalf("agreed is %+v: %+v", nodes, controller.Waits())
	}
	// A task that waits may wait for what is agreed and is so no more: all is told, once.
	now = seen(1, 17, 2, 16)
	now.Tasks = []Task{task("critical", "shop", 2, one(2)), task("large", "shop", 2, one(12)), task("late", "shop", 2, one(6))}
	if nodes := nodesOf(proposed(t, controller, 8, now)); len(nodes) != 4 || controller.Waits()["late"] == nil {
		t.Fatalf("agreed is %+v: %+v", nodes, controller.Waits())
	}
	if changes = proposed(t, controller, 9, now); len(changes) > 0 {
		t.Fatalf("agreed again is %+v", changes)
	}
}

// Looks that come faster than anything is agreed, each with other nodes, keep no task waiting.
func TestNoTaskWaitsForNodesThatChangeAllTheTime(t *testing.T) {
	cluster := Cluster{
		Nodes:        []Node{{"node-0", "", one(100)}, {"node-1", "", one(100)}},
		Applications: []Application{{Name: "shop", Quota: one(90), MostStrength: 2}},
	}
	controller := leading(cluster)
	cluster.Tasks = []Task{task("critical", "shop", 2, one(2))}
	for round := int64(1); round < 3; round++ {
		nodes := []Node{{"node-0", "", one(100 - round)}, {"node-1", "", one(100 - 2*round)}}
		cluster.Nodes = nodes
		controller.Saw(time.Duration(round), controller.Applied(), cluster)
		effects := controller.Step(time.Duration(round))
		// While that is on its way to the log, there are other nodes again.
		cluster.Nodes = []Node{{"node-0", "", one(99 - round)}, {"node-1", "", one(99 - 2*round)}}
		controller.Saw(time.Duration(round), controller.Applied(), cluster)
		for _, effect := range effects {
			if effect.Propose != nil {
				controller.Agreed(time.Duration(round), controller.Applied()+1, *effect.Propose)
			}
		}
	}
	if controller.State().Tasks["critical"] == nil {
		t.Fatalf("it waits: %+v", controller.Waits())
	}
}

// A cluster may use a name again, before anybody has seen that the first task is gone.
func TestATaskThatIsMadeAgainAsAnotherOneIsPlacedAsThat(t *testing.T) {
	cluster := Cluster{
		Nodes:        []Node{{"node-0", "", one(100)}, {"node-1", "", one(100)}, {"node-2", "", one(100)}},
		Applications: []Application{{Name: "shop", Quota: one(90), MostStrength: 3}},
	}
	controller := leading(cluster)
	now := time.Duration(1)
	for _, made := range []Task{task("again", "shop", 2, one(2)), task("again", "shop", 3, one(2)), task("again", "shop", 3, one(5)), task("again", "shop", 2, one(1))} {
		now++
		cluster.Tasks, cluster.Bound = []Task{made}, nil
		proposed(t, controller, now, cluster)
		placed := controller.State().Tasks["again"]
		if placed == nil || placed.Strength != made.Strength || placed.Demand != made.Demand || len(placed.Copies) != made.Strength {
			t.Fatalf("%+v is placed as %+v", made, placed)
		}
		// All of it is bound, and stays where it is whatever its Pods say that they are now: it only gets another R, and no smaller one while its copies are there.
		var words []Change
		for at, copy := range placed.Copies {
			cluster.Bound = append(cluster.Bound, Binding{"again", at, copy.Node, copy.Ticket})
			words = append(words, Change{Bound: &Word{"again", at, copy.Ticket}})
		}
		controller.Agreed(now, controller.Applied()+1, Entry{By: "b", Changes: words})
		other := made
		other.Strength = 5 - made.Strength
		cluster.Tasks = []Task{other}
		before := append([]Copy(nil), placed.Copies...)
		changes := proposed(t, controller, now, cluster)
		is := controller.State().Tasks["again"]
		if is == nil || is.Ending || is.Strength != 3 || len(is.Copies) != 3 || !reflect.DeepEqual(is.Copies[:len(before)], before) {
			t.Fatalf("what is bound is ended or moved: %+v, %+v", changes, is)
		}
	}
}
