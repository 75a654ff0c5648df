package allocation

import (
	"fmt"
	"testing"
	"time"
)

// Copies of one tenant that can never be bound, as many as may be under way, do not keep another one's from being tried.
func TestBindsThatFailDoNotHoldUpOthers(t *testing.T) {
	agreed := agreedState(t, 2, one(1000), Application{Name: "shop", Quota: one(1000), MostStrength: 2})
	for at := 0; at <= mostBinds; at++ {
		name := fmt.Sprintf("task-%02d", at)
		agreed.say(Change{Assign: &Assignment{Task: task(name, "shop", 2, one(1)), Places: []Place{{"node-0", "b"}, {"node-1", "c"}}}})
	}
	last := fmt.Sprintf("task-%02d", mostBinds)
	controller, now, tries := NewController("b", 1, DefaultTiming, agreed.state, agreed.index, 0), time.Duration(0), 0
	controller.bindNews = true
	for step := 0; step < 200; step++ {
		now += 10 * time.Millisecond
		for _, bind := range binds(controller.Step(now)) {
			if bind.Binding.Task == last {
				if tries > 5*mostBinds {
					t.Errorf("%d tries in two seconds, of copies that fail at once", tries)
				}
				return
			}
			tries++
			controller.Did(now, Effect{Bind: &bind}, Failed)
		}
	}
	t.Fatalf("it was never tried; others %d times", tries)
}

// What has failed is tried again without news, and soon at first.
func TestABindThatFailsIsTriedAgain(t *testing.T) {
	agreed := agreedState(t, 2, one(1000), Application{Name: "shop", Quota: one(1000), MostStrength: 2})
	agreed.say(Change{Assign: &Assignment{Task: task("critical", "shop", 2, one(1)), Places: []Place{{"node-0", "b"}, {"node-1", "c"}}}})
	controller := NewController("b", 1, DefaultTiming, agreed.state, agreed.index, 0)
	controller.bindNews = true
	var waited []time.Duration
	failed := time.Duration(0)
	for now := time.Duration(0); now < 12*time.Second; now += 10 * time.Millisecond {
		for _, bind := range binds(controller.Step(now)) {
			waited, failed = append(waited, now-failed), now
			controller.Did(now, Effect{Bind: &bind}, Failed)
		}
	}
	if fmt.Sprint(waited[:6]) != "[0s 200ms 400ms 800ms 1.6s 2s]" || waited[len(waited)-1] != mostRetry {
		t.Errorf("%v", waited)
	}
}

// All nodes fall silent at once: it is whoever tells of them that has died. Their copies have no other place, so nothing of them is ended, and they are what is agreed
// again when the nodes are back.
func TestCopiesComeBackWithTheirNodes(t *testing.T) {
	cluster := Cluster{Applications: []Application{{Name: "shop", Quota: one(90), MostStrength: 3}}, Tasks: []Task{task("critical", "shop", 3, one(1))}}
	for at := 0; at < 4; at++ {
		cluster.Nodes = append(cluster.Nodes, Node{fmt.Sprintf("node-%d", at), "", one(10)})
	}
	controller, index, now := leading(cluster), uint64(4), time.Duration(0)
	// It does all that is to be done, for three controllers, and sees what the cluster looks like.
	live := func(times int) {
		t.Helper()
		for ; times > 0; times-- {
			now += 100 * time.Millisecond
			for _, effect := range controller.Step(now) {
				switch {
				case effect.Propose != nil:
					index++
					if refusals := controller.Agreed(now, index, *effect.Propose); len(refusals) > 0 {
						t.Fatalf("%+v: %v", effect.Propose, refusals)
					}
				case effect.Bind != nil:
					controller.Did(now, effect, Done)
				case effect.Unbind != nil:
					t.Fatalf("%+v is ended", *effect.Unbind)
				}
			}
			controller.heard["b"], controller.heard["c"] = controller.ran, controller.ran
			controller.Saw(now, index, cluster)
		}
	}
	live(3)
	places := controller.state.Tasks["critical"]
	index++
	entry := Entry{By: "b"}
	for at, copy := range places.Copies {
		cluster.Bound = append(cluster.Bound, Binding{"critical", at, copy.Node, copy.Ticket})
		entry.Changes = append(entry.Changes, Change{Bound: &Word{"critical", at, copy.Ticket}})
	}
	controller.Agreed(now, index, entry)
	live(3)
	nodes := cluster.Nodes
	cluster.Nodes = nil
	live(10)
	if len(controller.state.Nodes) > 0 || controller.state.Tasks["critical"].Copies[0].Phase != Missing {
		t.Fatalf("%s", controller.state.Encode())
	}
	// The nodes are back.
	cluster.Nodes = nil
	for _, binding := range cluster.Bound {
		for _, node := range nodes {
			if node.Name == binding.Node {
				cluster.Nodes = append(cluster.Nodes, node)
			}
		}
	}
	live(10)
	for at, binding := range cluster.Bound {
		if copy := controller.state.Tasks["critical"].Copies[at]; copy.Phase != Bound || copy.Node != binding.Node || copy.Ticket != binding.Ticket {
			t.Errorf("copy %d was bound as %+v, and is %+v", at, binding, copy)
		}
	}

	// A node that dies alone: its copy gets another place, and only then what was there is ended.
	cluster.Nodes = append(append([]Node(nil), nodes...), Node{"node-4", "", one(10)})
	live(2)
	dead := cluster.Bound[0]
	for at, node := range cluster.Nodes {
		if node.Name == dead.Node {
			cluster.Nodes = append(cluster.Nodes[:at:at], cluster.Nodes[at+1:]...)
			break
		}
	}
	controller.Saw(now, index, cluster)
	for step := 0; step < 10; step++ {
		now += 100 * time.Millisecond
		for _, effect := range controller.Step(now) {
			if effect.Propose != nil {
				index++
				controller.Agreed(now, index, *effect.Propose)
				controller.Saw(now, index, cluster)
			}
			if effect.Unbind != nil {
				if copy := controller.state.Tasks["critical"].Copies[0]; *effect.Unbind != dead || copy.Phase != Assigned || copy.Node == dead.Node {
					t.Errorf("%+v is ended, and its copy is %+v", *effect.Unbind, copy)
				}
				return
			}
		}
	}
	t.Error("what the copy was on the dead node is never ended")
}
