package allocation

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// agreedState has three controllers, of which a leads, and so many nodes that are alike, each in a zone of its own.
func agreedState(t *testing.T, nodes int, each Resources, applications ...Application) *agreed {
	t.Helper()
	var all []Node
	for at := 0; at < nodes; at++ {
		all = append(all, Node{Name: fmt.Sprintf("node-%d", at), Capacity: each})
	}
	return newAgreed(all, applications, false)
}

func one(count int64) Resources { return Resources{count, count, count} }

func task(name, application string, strength int, demand Resources) Task {
	return Task{name, application, strength, demand}
}

func TestAnOfferIsTheFreePartDividedByR(t *testing.T) {
	agreed := agreedState(t, 9, one(100), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	offer := agreed.state.Offer("shop")
	if offer.Offered != one(30) || offer.Reserved != one(60) || offer.Free != one(90) {
		t.Fatalf("%+v", offer)
	}
	// R = 3: all that was reserved for it is used.
	agreed.place([]Task{task("critical", "shop", 3, one(10))})
	if offer = agreed.state.Offer("shop"); offer.Used != one(30) || offer.Offered != one(20) || offer.GivenBack != one(0) {
		t.Fatalf("%+v", offer)
	}
	// R = 1: it takes its own part, and what was reserved for two more copies is given back.
	agreed.place([]Task{task("single", "shop", 1, one(10))})
	offer = agreed.state.Offer("shop")
	if offer.Used != one(40) || offer.GivenBack != one(20) || offer.Offered != (Resources{16, 16, 16}) {
		t.Fatalf("%+v", offer)
	}
}

// With what is given back tasks with R = 1 get all of a quota but what one of them needs for its copies; without, they would get a third.
func TestTasksWithOneCopyGetBackWhatWasHeld(t *testing.T) {
	agreed := agreedState(t, 9, one(100), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	placed := 0
	for ; placed < 1000; placed++ {
		name := fmt.Sprintf("single-%d", placed)
		if begun := agreed.place([]Task{task(name, "shop", 1, one(1))}); !begun[name] {
			break
		}
	}
	if placed != 88 {
		t.Fatalf("%d tasks of 1 in a quota of 90", placed)
	}
}

// What the cluster places by itself is counted, and what was held for its copies is given back.
func TestWhatTheClusterPlacesByItselfIsCounted(t *testing.T) {
	agreed := agreedState(t, 9, one(100), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	beside := func(count int64) Offer {
		t.Helper()
		if err := agreed.state.setApplication(Application{Name: "shop", Quota: one(90), MostStrength: 3, Beside: one(count)}); err != nil {
			t.Fatal(err)
		}
		return agreed.state.Offer("shop")
	}
	if offer := beside(30); offer.Used != one(30) || offer.Free != one(60) || offer.Offered != one(20) || offer.Reserved != one(40) || offer.GivenBack != one(60) {
		t.Errorf("%+v", offer)
	}
	if begun := agreed.place([]Task{task("large", "shop", 3, one(21)), task("fits", "shop", 3, one(20))}); begun["large"] || !begun["fits"] {
		t.Errorf("placed are %v", begun)
	}
	// Some end, and others come.
	if offer := beside(10); offer.Used != one(70) || offer.GivenBack != one(60) {
		t.Errorf("%+v", offer)
	}
	if offer := beside(15); offer.Used != one(75) || offer.GivenBack != one(70) {
		t.Errorf("%+v", offer)
	}
	if err := agreed.state.setApplication(Application{Name: "shop", Quota: one(90), MostStrength: 3, Beside: one(-1)}); err == nil {
		t.Error("less than nothing is taken")
	}
}

func TestAllCopiesArePlacedOrNone(t *testing.T) {
	agreed := agreedState(t, 2, one(10), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	wanted := []Task{task("critical", "shop", 3, one(1))}
	if begun := agreed.place(wanted); begun["critical"] || len(agreed.state.Tasks) > 0 {
		t.Fatal("three copies on two nodes")
	}
	agreed.say(Change{SetNode: &Node{Name: "node-2", Capacity: one(1)}})
	if begun := agreed.place(wanted); !begun["critical"] {
		t.Fatal("three copies do not go on three nodes")
	}
}

// Two applications have four places and need three each. Plain anti-affinity can give each of them two.
func TestTwoApplicationsDoNotHoldHalfOfWhatBothNeed(t *testing.T) {
	nodes := 4
	agreed := agreedState(t, nodes, one(1), Application{Name: "left", Quota: one(4), MostStrength: 3}, Application{Name: "right", Quota: one(4), MostStrength: 3})
	wanted := []Task{task("one", "left", 3, one(1)), task("other", "right", 3, one(1))}
	begun := agreed.place(wanted)
	if len(begun) != 1 || len(agreed.state.Tasks) != 1 {
		t.Fatalf("%v", begun)
	}
	first, second := wanted[0], wanted[1]
	if !begun[first.Name] {
		first, second = second, first
	}
	for round := 0; round < 2*passedOver; round++ {
		if begun = agreed.place([]Task{second}); len(begun) > 0 {
			t.Fatal("five copies on four nodes")
		}
	}
	agreed.end(first)
	if begun = agreed.place([]Task{second}); !begun[second.Name] {
		t.Fatal("what was free again is not given to who waited")
	}
}

// A large task is not passed over for ever by small ones.
func TestWhoWaitsForLongGetsNodesSetAside(t *testing.T) {
	agreed := agreedState(t, 3, one(10), Application{Name: "small", Quota: one(30), MostStrength: 1}, Application{Name: "large", Quota: one(30), MostStrength: 3})
	var running []Task
	large := task("large", "large", 3, one(10))
	for at := 0; at < 6; at++ {
		running = append(running, task(fmt.Sprintf("first-%d", at), "small", 1, one(4)))
	}
	if begun := agreed.place(running); len(begun) != 6 {
		t.Fatalf("%v", begun)
	}
	for round := 0; round < 400; round++ {
		waiting := []Task{large}
		for at := 0; at < 3; at++ {
			waiting = append(waiting, task(fmt.Sprintf("small-%d-%d", round, at), "small", 1, one(4)))
		}
		begun := agreed.place(waiting)
		if begun[large.Name] {
			return
		}
		for _, small := range waiting[1:] {
			if begun[small.Name] {
				running = append(running, small)
			}
		}
		// One ends in each round, so never are three nodes empty at once by chance.
		if len(running) > 0 {
			agreed.end(running[0])
			running = running[1:]
		}
	}
	t.Fatal("it waits for ever")
}

func TestCopiesAreInDifferentZones(t *testing.T) {
	var nodes []Node
	for at, zone := range []string{"east", "east", "east", "west", "west", "north"} {
		nodes = append(nodes, Node{fmt.Sprintf("node-%d", at), zone, one(10 - int64(at))})
	}
	agreed := newAgreed(nodes, []Application{{Name: "shop", Quota: one(60), MostStrength: 3}}, false)
	agreed.place([]Task{task("critical", "shop", 3, one(1))})
	zones := map[string]bool{}
	for _, copy := range agreed.state.Tasks["critical"].Copies {
		zones[agreed.state.Nodes[copy.Node].Zone] = true
	}
	if len(zones) != 3 {
		t.Fatalf("%v", zones)
	}
	// A lost copy goes to a zone that has one rather than nowhere.
	agreed.say(Change{DropNode: "node-5"})
	plan := agreed.planner.Plan(agreed.state, nil, nil, nil)
	if len(plan.Moves) != 1 {
		t.Fatalf("%+v", plan)
	}
}

func TestALostCopyDoesNotGoWhereItsSiblingsAre(t *testing.T) {
	agreed := agreedState(t, 3, one(10), Application{Name: "shop", Quota: one(90), MostStrength: 3}, Application{Name: "other", Quota: one(90), MostStrength: 1})
	agreed.place([]Task{task("critical", "shop", 3, one(1))})
	agreed.say(Change{DropNode: "node-2"})
	// The only other node is fuller than those that have copies.
	agreed.say(Change{SetNode: &Node{Name: "node-3", Capacity: one(10)}})
	agreed.say(Change{Placed: &Placed{task("single", "other", 1, one(9)), Place{"node-3", "a"}, 1}})
	plan := agreed.planner.Plan(agreed.state, nil, nil, nil)
	if len(plan.Moves) != 1 || plan.Moves[0].Node != "node-3" {
		t.Fatalf("%+v", plan)
	}
}

// Of two lost copies one may go to a node that is gone, and waits; the other one goes where it may, though another node has more room.
func TestALostCopyGoesWhereItWishes(t *testing.T) {
	agreed := agreedState(t, 3, one(10), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	agreed.place([]Task{task("critical", "shop", 3, one(1))})
	for at, name := range []string{"node-3", "node-4"} {
		agreed.say(Change{SetNode: &Node{Name: name, Capacity: one(int64(10 * (at + 1)))}})
	}
	lost := map[string]int{}
	for at, copy := range agreed.state.Tasks["critical"].Copies {
		lost[copy.Node] = at
	}
	agreed.say(Change{DropNode: "node-0"})
	agreed.say(Change{DropNode: "node-1"})
	agreed.planner.wishes = []Wish{
		{Task: "critical", Copy: lost["node-0"], Nodes: []string{"node-0"}}, {Task: "critical", Copy: lost["node-1"], Nodes: []string{"node-2", "node-3"}},
	}
	plan := agreed.planner.Plan(agreed.state, nil, nil, nil)
	if len(plan.Moves) != 1 || plan.Moves[0].Copy != lost["node-1"] || plan.Moves[0].Node != "node-3" || plan.Waits["critical"] == nil {
		t.Fatalf("%+v", plan)
	}
}

func TestALateWordDoesNothing(t *testing.T) {
	agreed := agreedState(t, 4, one(10), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	agreed.place([]Task{task("critical", "shop", 3, one(1))})
	old := agreed.state.Tasks["critical"].Copies[0]
	agreed.say(Change{DropNode: old.Node})
	plan := agreed.planner.Plan(agreed.state, nil, nil, nil)
	agreed.say(Change{Move: &plan.Moves[0]})
	before := agreed.state.Sum()
	word := &Word{"critical", 0, old.Ticket}
	for _, late := range []Change{{Bound: word}, {Refused: word}, {Gone: word}, {Bound: &Word{"critical", 7, 1}}, {Gone: &Word{"nothing", 0, 1}}} {
		agreed.index++
		if refusals := agreed.state.Apply(agreed.index, Entry{By: "b", Changes: []Change{late}}); len(refusals) != 1 || agreed.state.Sum() != before {
			t.Fatalf("%+v: %v", late, refusals)
		}
	}
}

// leading is a controller that leads since entry 1, and has read who else there is, the nodes and the applications.
func leading(cluster Cluster) *Controller {
	controller := NewController("a", 1, DefaultTiming, NewState(), 0, 0)
	controller.Agreed(0, 1, Entry{By: "a", Life: 7, Changes: []Change{{Lead: new(uint64)}}})
	controller.Agreed(0, 2, Entry{By: "b"})
	controller.Agreed(0, 3, Entry{By: "c"})
	controller.Saw(0, 3, cluster)
	for _, effect := range controller.Step(0) {
		if effect.Propose != nil {
			controller.Agreed(0, 4, *effect.Propose)
		}
	}
	return controller
}

func binds(effects []Effect) (binds []BindTask) {
	for _, effect := range effects {
		if effect.Bind != nil {
			binds = append(binds, *effect.Bind)
		}
	}
	return binds
}

func TestATaskWithOneCopyIsPlacedAtOnceOnlyWhileNobodyElseCanLead(t *testing.T) {
	cluster := Cluster{
		Nodes: []Node{{"node-0", "", one(10)}}, Applications: []Application{{Name: "shop", Quota: one(10), MostStrength: 1}},
		Tasks: []Task{task("single", "shop", 1, one(1))},
	}
	if bound := binds(leading(cluster).Step(time.Millisecond)); len(bound) != 1 || bound[0].Binding.Node != "node-0" {
		t.Fatalf("%+v", bound)
	}
	if bound := binds(leading(cluster).Step(DefaultTiming.Dead / 2)); len(bound) > 0 {
		t.Fatalf("%+v", bound)
	}
}

// What a former leader did at once and did not come to tell is found by looking, and not done again.
func TestANewLeaderLooksBeforeItPlaces(t *testing.T) {
	cluster := Cluster{
		Nodes: []Node{{"node-0", "", one(10)}, {"node-1", "", one(10)}}, Applications: []Application{{Name: "shop", Quota: one(10), MostStrength: 1}},
	}
	controller := leading(cluster)
	controller.Step(0)
	// It loses the office, and takes it again.
	number := controller.State().Office.Number
	controller.Agreed(1, 5, Entry{By: "b", Changes: []Change{{Lead: &number}}})
	number = 5
	controller.saying = false
	controller.Agreed(2, 6, Entry{By: "a", Life: 1, Changes: []Change{{Lead: &number}}})
	controller.lease = time.Hour
	cluster.Tasks = []Task{task("single", "shop", 1, one(1))}
	controller.Saw(3, 5, cluster)
	if bound := binds(controller.Step(3)); len(bound) > 0 {
		t.Fatalf("by a look of before: %+v", bound)
	}
	controller.saying = false
	cluster.Bound = []Binding{{"single", 0, "node-1", 5}}
	controller.Saw(4, 6, cluster)
	for _, effect := range controller.Step(4) {
		if effect.Bind != nil {
			t.Fatalf("it is bound again: %+v", effect.Bind)
		}
		if effect.Propose != nil && effect.Propose.Changes[0].Placed != nil {
			return
		}
	}
	t.Fatal("what is bound is not told")
}

func TestWhatDoesNotFitIsRefusedByAllAlike(t *testing.T) {
	agreed := agreedState(t, 3, one(10), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	places := func(nodes ...string) (places []Place) {
		for at, node := range nodes {
			places = append(places, Place{node, string(rune('a' + at))})
		}
		return places
	}
	cases := []struct {
		assignment Assignment
		why        string
	}{
		{Assignment{Task: task("x", "shop", 2, one(1)), Places: places("node-0", "node-0")}, "has a copy"},
		{Assignment{Task: task("x", "shop", 2, one(11)), Places: places("node-0", "node-1")}, "has room for"},
		{Assignment{Task: task("x", "shop", 2, one(31)), Places: places("node-0", "node-1")}, "is offered"},
		{Assignment{Task: task("x", "shop", 2, one(1)), Places: places("node-0", "nowhere")}, "no node"},
		{Assignment{Task: task("x", "shop", 2, one(1)), Places: places("node-0")}, "1 places for 2"},
		{Assignment{Task: task("x", "nobody", 2, one(1)), Places: places("node-0", "node-1")}, "no application"},
		{Assignment{Task: task("x", "shop", 4, one(1)), Places: places("node-0", "node-1")}, "R is from 1 to 3"},
		{Assignment{Task: task("x", "shop", 1, one(1)), Places: places("node-0")}, "at once"},
		{Assignment{Task: task("x", "shop", 2, one(-1)), Places: places("node-0", "node-1")}, "an amount is"},
		{Assignment{Task: task("x", "shop", 2, one(1)), Places: []Place{{"node-0", "a"}, {"node-1", "nobody"}}}, "not alive"},
		{Assignment{Task: task("x", "shop", 2, one(1)), Places: []Place{{"node-0", "a"}, {"node-1", "a"}}}, "its share"},
	}
	before := agreed.state.Sum()
	for _, wrong := range cases {
		entry := Entry{By: "a", Office: agreed.state.Office.Number, Changes: []Change{{Assign: &wrong.assignment}}}
		agreed.index++
		refusals := agreed.state.Apply(agreed.index, entry)
		if len(refusals) != 1 || !strings.Contains(refusals[0].Why.Error(), wrong.why) {
			t.Errorf("%+v: %v, not '%s'", wrong.assignment, refusals, wrong.why)
		}
	}
	// Who led before decides nothing any more.
	number := agreed.state.Office.Number
	stale := Entry{By: "a", Office: number, Changes: []Change{{DropNode: "node-0"}}}
	agreed.state.Apply(1000, Entry{By: "b", Changes: []Change{{Lead: &number}}})
	if refusals := agreed.state.Apply(1001, stale); len(refusals) != 1 || agreed.state.Nodes["node-0"] == nil {
		t.Fatal("a decision of who leads no more counts")
	}
	if refusals := agreed.state.Apply(1002, Entry{By: "c", Changes: []Change{{Lead: &number}}}); len(refusals) != 1 {
		t.Fatal("the office was taken twice")
	}
	agreed.state.Office.Leader, agreed.state.Office.Number = "a", number
	if agreed.state.Sum() != before {
		t.Fatal("what was refused has changed something")
	}
}

func TestWhatIsNoEntryIsLeftOut(t *testing.T) {
	for _, text := range []string{"", "{", "7", "{}", `{"version":1}`, `{"version":1,"by":"a","unknown":1}`, `{"version":0,"by":"a"}`} {
		if entry, err := Decode([]byte(text)); err == nil {
			t.Errorf("%q: %+v", text, entry)
		}
	}
	if _, err := Decode([]byte(`{"version":1,"by":"a"}`)); err != nil {
		t.Errorf("an entry of an earlier version: %v", err)
	}
	if _, err := Decode([]byte(fmt.Sprintf(`{"version":%d,"by":"a","news":true}`, Version+1))); err != (ErrLater{Version + 1}) {
		t.Errorf("an entry of a later version: %v", err)
	}
}

func TestACheckpointInPartsIsTheWholeState(t *testing.T) {
	agreed := agreedState(t, 40, one(1<<30), Application{Name: "shop", Quota: one(1 << 39), MostStrength: 3})
	for at := 0; at < 800; at++ {
		agreed.place([]Task{task(fmt.Sprintf("task-%d", at), "shop", 3, one(1))})
	}
	parts := Checkpoints(agreed.state, agreed.index)
	if len(parts) < 3 {
		t.Fatalf("%d parts", len(parts))
	}
	loader := NewLoader(agreed.index - 1)
	index := agreed.index
	for at := range parts {
		if size := len(Entry{By: "a", Checkpoint: &parts[at]}.Encode()); size > 256<<10 {
			t.Fatalf("an entry of %d bytes", size)
		}
		// Others have their say between the parts.
		ended := Entry{By: "a", Office: agreed.state.Office.Number, Changes: []Change{{End: fmt.Sprintf("task-%d", at)}}}
		for _, entry := range []Entry{ended, {By: "a", Checkpoint: &parts[at]}} {
			index++
			agreed.state.Apply(index, entry)
			state, err := loader.Take(index, entry)
			if err != nil {
				t.Fatal(err)
			}
			if last := at == len(parts)-1 && entry.Checkpoint != nil; last != (state != nil) {
				t.Fatalf("part %d: %v", at, state != nil)
			}
			if state != nil && state.Sum() != agreed.state.Sum() {
				t.Fatal("another state")
			}
		}
	}
}

func TestWhoStoodStillDoesNotTakeOthersForDead(t *testing.T) {
	controller := NewController("a", 1, DefaultTiming, NewState(), 0, 0)
	controller.Agreed(0, 1, Entry{By: "b", Changes: []Change{{Lead: new(uint64)}}})
	for _, effect := range controller.Step(time.Minute) {
		if effect.Propose != nil && len(effect.Propose.Changes) > 0 {
			t.Fatalf("%+v", effect.Propose)
		}
	}
	// But it does those that it has heard nothing of while it ran.
	controller.saying = false
	for now := time.Minute; now < time.Minute+2*DefaultTiming.Dead; now += DefaultTiming.Alive / 2 {
		for _, effect := range controller.Step(now) {
			if effect.Propose != nil && len(effect.Propose.Changes) == 1 && effect.Propose.Changes[0].Lead != nil {
				return
			}
			controller.saying = false
		}
	}
	t.Fatal("it never wants to lead")
}

// The comparison itself: the same seed gives the same, and the division is what keeps copies from waiting in vain.
func TestTheComparisonIsRepeatable(t *testing.T) {
	workload := Workload{Seed: 7, Nodes: 12, Ticks: 100, Load: 1.2, Services: true}
	tripod, again, plain := Compare(workload, Tripod), Compare(workload, Tripod), Compare(workload, AntiAffinity)
	if tripod != again {
		t.Fatalf("%+v, then %+v", tripod, again)
	}
	if tripod.InVain != 0 || tripod.Jammed != 0 || plain.Jammed == 0 || plain.InVain == 0 {
		t.Fatalf("%+v\n%+v", tripod, plain)
	}
}
