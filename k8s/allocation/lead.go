package allocation

import (
	"sort"
	"time"
)

// lead is what the leading controller decides and does at once. The decisions fit into one entry.
func (controller *Controller) lead(now time.Duration, effects []Effect) ([]Change, []Effect) {
	changes := controller.replaceControllers()
	if len(changes) == 0 && !controller.planNews {
		return nil, effects
	}
	controller.planNews = false
	var beside []Change
	if len(changes) == 0 && controller.cluster != nil {
		changes, beside = controller.follow()
	}
	if len(changes) == 0 && controller.cluster != nil {
		changes = controller.returns()
	}
	if len(changes) > 0 || controller.cluster == nil {
		// Places are chosen once this is agreed.
		changes, _ = cut(append(changes, beside...))
		return changes, effects
	}
	// What the cluster places by itself changes all the time, and no place waits for it to be agreed: the planner knows it, and what it leaves of the nodes.
	changes = beside
	effects = controller.endStrays(now, effects)
	ahead := controller.takenAtOnce()
	planner, seen := controller.planner, controller.cluster
	planner.beside, planner.wishes, planner.nodes, planner.unfit = controller.beside, seen.Wishes, seen.Nodes, seen.Unfit
	plan := controller.planner.Plan(controller.state, controller.cluster.Tasks, ahead, controller.full)
	controller.waits = plan.Waits
	_, waits := controller.resizes(nil)
	for name, err := range waits {
		controller.waits[name] = err
	}
	used, others := controller.capacities(plan)
	changes = append(changes, used...)
	for at := range plan.Moves {
		changes = append(changes, Change{Move: &plan.Moves[at]})
	}
	for at := range plan.Assignments {
		changes = append(changes, Change{Assign: &plan.Assignments[at]})
	}
	changes = append(changes, others...)
	// Without agreement, so only while nobody else can lead.
	if now < controller.lease {
		for _, assignment := range plan.AtOnce {
			effects = controller.placeAtOnce(assignment, effects)
		}
	}
	changes, _ = cut(changes)
	return changes, effects
}

// placeAtOnce binds the one copy of a task with R = 1 (S3).
func (controller *Controller) placeAtOnce(assignment Assignment, effects []Effect) []Effect {
	place := Place{assignment.Places[0].Node, controller.name}
	binding := Binding{assignment.Name, 0, place.Node, controller.applied}
	if controller.told[Word{binding.Task, 0, binding.Ticket}] || !controller.begin(binding) {
		return effects
	}
	controller.ahead[assignment.Name] = Placed{assignment.Task, place, binding.Ticket}
	return append(effects, Effect{Bind: &BindTask{binding, assignment.Task}})
}

// replaceControllers drops those that are silent, and gives the copies of the dead to the living.
func (controller *Controller) replaceControllers() []Change {
	var changes []Change
	for _, name := range controller.state.living() {
		if name != controller.name && controller.silent(name) {
			changes = append(changes, Change{DropController: name})
		}
	}
	if len(changes) > 0 {
		return changes
	}
	living := controller.state.living()
	for _, task := range controller.state.sortedTasks() {
		for at, copy := range task.Copies {
			if copy.Phase != Missing && !controller.state.Controllers[copy.Controller] {
				heir := living[len(changes)%len(living)]
				changes = append(changes, Change{Reassign: &Reassign{task.Name, at, heir}})
			}
		}
	}
	return changes
}

// capacities are what nodes are seen to have now, where something else is agreed: of those that a plan uses, which everybody judges its places by; and of all
// others where a task waits, since it is agreed in which zones it would have room. Otherwise nobody needs them, and a cluster in which ordinary Pods come and go
// would agree on nothing else.
func (controller *Controller) capacities(plan Plan) (used, others []Change) {
	places := map[string]bool{}
	for _, move := range plan.Moves {
		places[move.Node] = true
	}
	for _, assignment := range plan.Assignments {
		for _, place := range assignment.Places {
			places[place.Node] = true
		}
	}
	if len(places) == 0 && len(plan.Waits) == 0 {
		return nil, nil
	}
	for at, node := range controller.cluster.Nodes {
		known, change := controller.state.Nodes[node.Name], Change{SetNode: &controller.cluster.Nodes[at]}
		switch {
		case known == nil || known.Capacity == node.Capacity:
		case places[node.Name]:
			used = append(used, change)
		case len(plan.Waits) > 0:
			others = append(others, change)
		}
	}
	return used, others
}

// follow makes what is agreed follow what is seen: which nodes there are, applications, tasks that are not wanted any more; and beside them, what the cluster has
// placed by itself. What nodes have comes with the places that need it ([Controller.capacities]). What is seen of an application is bounded as all amounts are: a decision
// that everybody refuses would be made again and again, and nothing else beside it.
func (controller *Controller) follow() (changes, beside []Change) {
	nodes, applications := map[string]bool{}, map[string]bool{}
	for at, node := range controller.cluster.Nodes {
		nodes[node.Name] = true
		if known := controller.state.Nodes[node.Name]; known == nil || known.Zone != node.Zone {
			changes = append(changes, Change{SetNode: &controller.cluster.Nodes[at]})
		}
	}
	for _, name := range sortedNames(controller.state.Nodes) {
		if !nodes[name] {
			changes = append(changes, Change{DropNode: name})
		}
	}
	for at := range controller.cluster.Applications {
		application := controller.cluster.Applications[at]
		application.Quota, application.Beside = application.Quota.Bounded(), application.Beside.Bounded()
		applications[application.Name] = true
		known, change := controller.state.Applications[application.Name], Change{SetApplication: &application}
		if known == nil {
			changes = append(changes, change)
			continue
		}
		same := known.Application
		same.Beside = application.Beside
		if same != application {
			changes = append(changes, change)
		} else if known.Beside != application.Beside {
			beside = append(beside, change)
		}
	}
	for _, name := range sortedNames(controller.state.Applications) {
		if !applications[name] && controller.state.used[name] == (Resources{}) {
			changes = append(changes, Change{DropApplication: name})
		}
	}
	bound, ended := map[string]bool{}, map[string]bool{}
	for _, binding := range controller.cluster.Bound {
		bound[binding.Task] = true
	}
	for _, task := range controller.state.sortedTasks() {
		name := task.Name
		wanted, is := controller.wanted[name]
		// One that was ended and made again as another one, before anybody saw that it was gone: none of its copies would be bound as it is agreed.
		another := is && !bound[name] && (wanted.Strength != task.Strength || wanted.Demand != task.Demand)
		if (!is || another) && !task.Ending {
			changes = append(changes, Change{End: name})
			ended[name] = true
		}
	}
	resizes, _ := controller.resizes(ended)
	return append(changes, resizes...), beside
}

// sortedNames are in order, so that the same is decided in the same order: a test's seed repeats what it has found.
func sortedNames[Known any](all map[string]Known) []string {
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// resizes are of tasks that run and are to have another R, as far as their applications' quotas reach by now; and why the others wait that are to have more. Those
// that are ended stay out.
func (controller *Controller) resizes(ended map[string]bool) (changes []Change, waits map[string]error) {
	waits = map[string]error{}
	now := newView(controller.state, controller.takenAtOnce(), controller.beside)
	for _, task := range controller.state.sortedTasks() {
		wanted, is := controller.wanted[task.Name]
		if !is || task.Ending || ended[task.Name] || wanted.Strength == task.Strength {
			continue
		}
		resize := Resize{task.Name, wanted.Strength}
		if err := controller.state.mayResize(resize, now.free[task.Application]); err == nil {
			now.free[task.Application] = now.free[task.Application].Minus(controller.state.more(resize))
			changes = append(changes, Change{Resize: &resize})
		} else if wanted.Strength > task.Strength {
			waits[task.Name] = err
		}
	}
	return changes, waits
}

// takenAtOnce are the places of tasks with R = 1 that are not agreed yet, in order.
func (controller *Controller) takenAtOnce() []Placed {
	ahead := make([]Placed, 0, len(controller.ahead))
	for _, placed := range controller.ahead {
		ahead = append(ahead, placed)
	}
	sort.Slice(ahead, func(i, j int) bool { return ahead[i].Name < ahead[j].Name })
	return ahead
}

// compare finds what is bound and not agreed, and what is agreed and not bound.
func (controller *Controller) compare(asOf uint64) {
	bound := map[Binding]bool{}
	for _, binding := range controller.cluster.Bound {
		bound[binding] = true
		if task, wanted := controller.wanted[binding.Task]; wanted && controller.untold(task, binding) {
			// By a leader who did not come to say so.
			placed := Placed{task, Place{binding.Node, controller.name}, binding.Ticket}
			controller.ahead[task.Name] = placed
			controller.tell(Change{Placed: &placed})
		}
		// What it takes there is not counted.
		if controller.stray(binding) || controller.waitsFor(binding) {
			controller.full[binding.Node] = true
		}
	}
	for _, task := range controller.state.sortedTasks() {
		for at, copy := range task.Copies {
			if copy.Phase == Bound && copy.Since <= asOf && !bound[Binding{task.Name, at, copy.Node, copy.Ticket}] {
				controller.tell(Change{Gone: &Word{task.Name, at, copy.Ticket}})
			}
		}
	}
}

// untold says whether a binding is a task's with R = 1 of which no entry tells.
func (controller *Controller) untold(task Task, binding Binding) bool {
	if task.Strength != 1 || controller.underWay[binding] {
		return false
	}
	known := controller.state.Tasks[task.Name]
	return known == nil || !known.Ending && known.Copies[0].Phase == Missing && known.Copies[0].Ticket < binding.Ticket
}

// stray says whether something is bound that, by all that was agreed since, is not to be there.
func (controller *Controller) stray(binding Binding) bool {
	task := controller.state.Tasks[binding.Task]
	if task == nil {
		wanted, known := controller.wanted[binding.Task]
		return binding.Ticket <= controller.applied && (!known || wanted.Strength > 1)
	}
	if binding.Copy < 0 || binding.Copy >= len(task.Copies) {
		return true
	}
	copy := task.Copies[binding.Copy]
	if copy.Phase != Missing && copy.Ticket == binding.Ticket && copy.Node == binding.Node {
		return false
	}
	if controller.waitsFor(binding) {
		return false
	}
	_, ahead := controller.ahead[binding.Task]
	return binding.Ticket <= copy.Ticket && !ahead
}

func (controller *Controller) endStrays(now time.Duration, effects []Effect) []Effect {
	for _, binding := range controller.cluster.Bound {
		if controller.stray(binding) && controller.mayTry(binding, now) && controller.begin(binding) {
			stray := binding
			effects = append(effects, Effect{Unbind: &stray})
		}
	}
	return effects
}
