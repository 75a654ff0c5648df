package allocation

import "testing"

// A large task waits for three of four nodes, and for all that have room. What runs comes first: a copy of it that is lost goes there.
func TestALostCopyMayGoWhereNodesAreSetAside(t *testing.T) {
	agreed := agreedState(t, 4, one(10), Application{Name: "shop", Quota: one(90), MostStrength: 3})
	agreed.place([]Task{task("critical", "shop", 2, one(8))})
	big := task("big", "shop", 3, one(10))
	agreed.planner.passed["big"] = passedOver
	if plan := agreed.planner.Plan(agreed.state, []Task{big}, nil, nil); plan.Waits["big"] == nil || len(agreed.planner.aside) != 3 {
		t.Fatalf("%+v, aside are %v", plan, agreed.planner.aside)
	}
	for _, copy := range agreed.state.Tasks["critical"].Copies {
		if !agreed.planner.aside[copy.Node] {
			agreed.say(Change{DropNode: copy.Node})
			break
		}
	}
	plan := agreed.planner.Plan(agreed.state, []Task{big}, nil, nil)
	if len(plan.Moves) != 1 || len(agreed.planner.aside) != 3 || !agreed.planner.aside[plan.Moves[0].Node] || len(plan.Assignments) > 0 {
		t.Fatalf("%+v, aside are %v", plan, agreed.planner.aside)
	}
}

// While a task may not be placed at all, whatever room there is, no nodes are set aside for it.
func TestNoNodesAreSetAsideForWhoWaitsForItsQuota(t *testing.T) {
	agreed := agreedState(t, 3, one(10), Application{Name: "large", Quota: one(30), MostStrength: 3}, Application{Name: "small", Quota: one(30), MostStrength: 2})
	agreed.place([]Task{task("first", "small", 2, one(1))})
	big := task("big", "large", 3, one(10))
	agreed.planner.passed["big"] = passedOver
	plan := func() Plan {
		return agreed.planner.Plan(agreed.state, []Task{big, task("second", "small", 2, one(2))}, nil, nil)
	}
	if plan := plan(); len(agreed.planner.aside) != 3 || len(plan.Assignments) > 0 {
		t.Fatalf("%+v, aside are %v", plan, agreed.planner.aside)
	}
	agreed.planner.beside = map[string]Resources{"large": one(1)}
	if plan := plan(); agreed.planner.aside != nil || len(plan.Assignments) != 1 || plan.Assignments[0].Name != "second" {
		t.Fatalf("%+v, aside are %v", plan, agreed.planner.aside)
	}
	agreed.planner.beside = nil
	if plan := plan(); len(agreed.planner.aside) != 3 || len(plan.Assignments) > 0 {
		t.Fatalf("%+v, aside are %v", plan, agreed.planner.aside)
	}
}
