package allocation

import (
	"errors"
	"fmt"
	"sort"
)

// passedOver is how often a task may be passed over by others before nodes are set aside for it.
const passedOver = 16

// mostPlanned are the tasks that a plan places: about what fits into an entry. The others come with the next one.
const mostPlanned = 192

// Planner is how the leading controller chooses places. What it keeps is its own, and not agreed: nothing but fairness depends on it.
type Planner struct {
	passed map[string]int
	// beside is what applications have now that the cluster has placed by itself: it is ahead of what is agreed.
	beside map[string]Resources
	// wishes are what the cluster says of copies that have no node yet. They are not agreed: a copy that is bound has been judged by the cluster too.
	wishes []Wish
	// nodes are what they are seen to have: it is ahead of what is agreed.
	nodes []Node
	// unfit are the nodes that cannot run a task, and why. They are not agreed, but for the number of zones that are left.
	unfit map[string]map[string]string
	// aside are nodes on which nothing else is placed until this task is, but for lost copies. There is one such task at most in the cluster, so no two
	// can each hold what the other needs.
	asideFor string
	aside    map[string]bool
}

// NewPlanner returns one that has passed nobody over.
func NewPlanner() *Planner { return &Planner{passed: map[string]int{}} }

// Plan is what can be placed now.
type Plan struct {
	// Moves and Assignments have to be agreed; AtOnce are tasks with R = 1, each with its node.
	Moves       []Move
	Assignments []Assignment
	AtOnce      []Assignment
	// Waits says of each task why it waits.
	Waits map[string]error
}

// view is what would be free once the plan is carried out.
type view struct {
	state *State
	names []string
	room  map[string]Resources
	// capacity is what each node has in all.
	capacity map[string]Resources
	free     map[string]Resources
	whole    Resources
	next     int
	alive    []string
}

// Plan places lost copies anew, and then of the queue, which is in the order of arrival, as many tasks as fit: first the next one of the application
// with the least dominant share. ahead are places that were taken at once and are not agreed yet; full are nodes that had no room though the
// state says so.
func (planner *Planner) Plan(state *State, queue []Task, ahead []Placed, full map[string]bool) Plan {
	plan := Plan{Waits: map[string]error{}}
	now := newView(state, ahead, planner.beside)
	for _, node := range planner.nodes {
		if room, known := now.room[node.Name]; known {
			now.room[node.Name] = room.Plus(node.Capacity.Minus(now.capacity[node.Name]))
			now.capacity[node.Name] = node.Capacity
		}
	}
	for name := range full {
		if _, known := now.room[name]; known {
			now.room[name] = Resources{-1, -1, -1}
		}
	}
	if len(now.alive) == 0 {
		return plan
	}
	taken := map[string]bool{}
	for _, placed := range ahead {
		taken[placed.Name] = true
	}
	planner.choose(now, queue, taken)
	for _, task := range state.sortedTasks() {
		if !taken[task.Name] {
			planner.mend(now, task, &plan)
		}
	}
	planner.place(now, queue, taken, &plan)
	return plan
}

// newView is what is free with what is ahead of the agreed: places that were taken at once, and what the cluster has placed by itself.
func newView(state *State, ahead []Placed, beside map[string]Resources) *view {
	now := &view{state: state, room: map[string]Resources{}, capacity: map[string]Resources{}, free: map[string]Resources{}, alive: state.living()}
	for name, node := range state.Nodes {
		now.names = append(now.names, name)
		now.room[name], now.capacity[name] = state.Room(name), node.Capacity
	}
	sort.Strings(now.names)
	now.whole, _ = state.Whole()
	for name, application := range state.Applications {
		now.free[name] = state.Offer(name).Free.Minus(beside[name].Minus(application.Beside).OrNothing())
	}
	for _, placed := range ahead {
		now.take(placed.Task, []Place{placed.Place})
		if task := state.Tasks[placed.Name]; task != nil {
			now.free[placed.Application] = now.free[placed.Application].Plus(placed.Demand)
		}
	}
	return now
}

func (now *view) take(task Task, places []Place) {
	for _, place := range places {
		if room, known := now.room[place.Node]; known {
			now.room[place.Node] = room.Minus(task.Demand)
		}
	}
	now.free[task.Application] = now.free[task.Application].Minus(task.Demand.Times(task.Strength))
}

// controller is the next living one in turn.
func (now *view) controller() string {
	now.next++
	return now.alive[(now.next-1)%len(now.alive)]
}

// choose finds the task for which nodes are set aside: the oldest that has been passed over often enough.
func (planner *Planner) choose(now *view, queue []Task, taken map[string]bool) {
	waiting := map[string]bool{}
	for _, task := range queue {
		waiting[task.Name] = !taken[task.Name] && now.state.Tasks[task.Name] == nil
	}
	for name := range planner.passed {
		if !waiting[name] {
			delete(planner.passed, name)
		}
	}
	// Where it waits for its application's quota, they would be of no use to anybody.
	if at, is := indexOf(queue, planner.asideFor); is && waiting[planner.asideFor] && now.has(planner.aside) && now.mayPlace(queue[at]) == nil {
		return
	}
	planner.asideFor, planner.aside = "", nil
	for _, task := range queue {
		if planner.passed[task.Name] < passedOver || now.mayPlace(task) != nil {
			continue
		}
		// By what the nodes have, not by what is free now: what runs on them ends one day.
		if nodes := now.byCapacity(task, planner.unfit[task.Name]); nodes != nil {
			planner.asideFor, planner.aside = task.Name, map[string]bool{}
			for _, node := range nodes {
				planner.aside[node] = true
			}
			return
		}
	}
}

func (now *view) has(nodes map[string]bool) bool {
	for name := range nodes {
		if _, known := now.room[name]; !known {
			return false
		}
	}
	return true
}

// mend places what a task has lost.
func (planner *Planner) mend(now *view, task *TaskState, plan *Plan) {
	if task.Ending {
		return
	}
	var kept []string
	var lost []int
	for at, copy := range task.Copies {
		if copy.Phase == Missing {
			lost = append(lost, at)
		} else {
			kept = append(kept, copy.Node)
		}
	}
	for _, at := range lost {
		closed := planner.closed(now, task.Name, at)
		nodes := now.pick(task.Task, 1, kept, closed, share(task.Strength, now.state.zones(task.Task, planner.unfitFor(task.Name, at))), false)
		if nodes == nil {
			// In a zone that has a copy rather than nowhere.
			nodes = now.pick(task.Task, 1, kept, closed, task.Strength, false)
		}
		if nodes == nil {
			plan.Waits[task.Name] = errors.New("a copy is lost, and no other node where it may go has room for it" + saysUnfit(planner.unfitFor(task.Name, at)))
			continue
		}
		place := Place{nodes[0], now.controller()}
		kept = append(kept, place.Node)
		now.room[place.Node] = now.room[place.Node].Minus(task.Demand)
		if task.Strength == 1 {
			plan.AtOnce = append(plan.AtOnce, Assignment{Task: task.Task, Places: []Place{place}})
		} else {
			plan.Moves = append(plan.Moves, Move{task.Name, at, place})
		}
	}
}

// asideBut are the nodes that are set aside for another task than this one.
func (planner *Planner) asideBut(task string) map[string]bool {
	if planner.asideFor == task {
		return nil
	}
	return planner.aside
}

// closed are the nodes where a lost copy may not go: not among those that it wishes, or unable to run it. Those that are set aside are not: what waits has nothing
// to lose, and comes after what runs with a copy less.
func (planner *Planner) closed(now *view, task string, copy int) map[string]bool {
	closed, wish := closedTo(nil, planner.unfitFor(task, copy)), planner.wish(task, copy)
	if wish == nil {
		return closed
	}
	wished := map[string]bool{}
	for _, name := range wish.Nodes {
		wished[name] = true
	}
	for _, name := range now.names {
		if !wished[name] {
			closed[name] = true
		}
	}
	return closed
}

// wish is a lost copy's; nil if it has none.
func (planner *Planner) wish(task string, copy int) *Wish {
	for at, wish := range planner.wishes {
		if wish.Task == task && wish.Copy == copy {
			return &planner.wishes[at]
		}
	}
	return nil
}

func (planner *Planner) place(now *view, queue []Task, taken map[string]bool, plan *Plan) {
	waiting := map[string][]Task{}
	var applications []string
	for _, task := range queue {
		if taken[task.Name] || now.state.Tasks[task.Name] != nil {
			continue
		}
		if waiting[task.Application] == nil {
			applications = append(applications, task.Application)
		}
		waiting[task.Application] = append(waiting[task.Application], task)
	}
	if at, waits := indexOf(queue, planner.asideFor); waits {
		// Before all others, for whom its nodes are no use.
		task := queue[at]
		if assignment, err := planner.assign(now, task); err == nil {
			planner.put(now, assignment, plan)
			application := waiting[task.Application]
			at, _ := indexOf(application, task.Name)
			waiting[task.Application] = append(application[:at:at], application[at+1:]...)
		}
	}
	var passed []string
	for len(plan.AtOnce)+len(plan.Assignments) < mostPlanned {
		name := now.leastServed(applications, waiting)
		if name == "" {
			break
		}
		task := waiting[name][0]
		waiting[name] = waiting[name][1:]
		assignment, err := planner.assign(now, task)
		if err != nil {
			plan.Waits[task.Name] = err
			if !now.possible(task, planner.unfit[task.Name]) {
				continue
			}
			passed = append(passed, task.Name)
			if planner.passed[task.Name] >= passedOver {
				// For its application's quota or for the nodes set aside: the application's later tasks overtake it no more.
				for _, later := range waiting[name] {
					plan.Waits[later.Name] = fmt.Errorf("task '%s' of the same application has waited for longer", task.Name)
				}
				waiting[name] = nil
			}
			continue
		}
		planner.put(now, assignment, plan)
	}
	if len(plan.AtOnce)+len(plan.Assignments) > 0 {
		for _, name := range passed {
			planner.passed[name]++
		}
	}
}

func (*Planner) put(now *view, assignment Assignment, plan *Plan) {
	now.take(assignment.Task, assignment.Places)
	if assignment.Strength == 1 {
		plan.AtOnce = append(plan.AtOnce, assignment)
	} else {
		plan.Assignments = append(plan.Assignments, assignment)
	}
}

func indexOf(tasks []Task, name string) (int, bool) {
	for at, task := range tasks {
		if task.Name == name {
			return at, true
		}
	}
	return 0, false
}

// leastServed is the application with the least dominant share that has tasks waiting.
func (now *view) leastServed(applications []string, waiting map[string][]Task) string {
	least, name := 0.0, ""
	for _, application := range applications {
		if len(waiting[application]) == 0 {
			continue
		}
		if share := now.dominantShare(application); name == "" || share < least {
			least, name = share, application
		}
	}
	return name
}

// possible says whether a task could be placed if nothing else were.
func (now *view) possible(task Task, unfit map[string]string) bool {
	application := now.state.Applications[task.Application]
	return application != nil && task.Strength >= 1 && task.Strength <= application.MostStrength &&
		task.Demand.Fits(application.Quota.DividedBy(application.MostStrength)) &&
		now.byCapacity(task, unfit) != nil
}

func (now *view) dominantShare(application string) float64 {
	known := now.state.Applications[application]
	if known == nil {
		return 0
	}
	return known.Quota.Minus(now.free[application]).DominantShare(now.whole)
}

func (now *view) mayPlace(task Task) error {
	if err := now.state.MayPlace(task); err != nil {
		return err
	}
	return now.state.offers(task, now.free[task.Application])
}

// assign chooses places for all copies of a task, or says why it cannot.
func (planner *Planner) assign(now *view, task Task) (Assignment, error) {
	if err := now.mayPlace(task); err != nil {
		return Assignment{}, err
	}
	unfit, assignment := planner.unfit[task.Name], Assignment{Task: task}
	zones := now.state.zones(task, unfit)
	nodes := now.pick(task, task.Strength, nil, closedTo(planner.asideBut(task.Name), unfit), share(task.Strength, zones), false)
	if nodes == nil {
		return Assignment{}, fmt.Errorf("fewer than %d nodes (in different zones, where they have some) have room for %v%s", task.Strength, task.Demand, saysUnfit(unfit))
	}
	if len(unfit) > 0 {
		assignment.Zones = zones
	}
	for _, node := range nodes {
		assignment.Places = append(assignment.Places, Place{node, now.controller()})
	}
	return assignment, nil
}

// byCapacity are nodes for all copies of a task, whatever is placed on them now; nil if there are too few.
func (now *view) byCapacity(task Task, unfit map[string]string) []string {
	return now.pick(task, task.Strength, nil, closedTo(nil, unfit), share(task.Strength, now.state.zones(task, unfit)), true)
}

// pick chooses nodes for so many copies of a task, beside those that are kept and not among those that are closed: the freest first, each once, no zone with more than it
// holds. By capacity: what is placed on them now does not count. Nil: there are too few.
func (now *view) pick(task Task, count int, kept []string, closed map[string]bool, zoneHolds int, byCapacity bool) []string {
	inZone, not := map[string]int{}, map[string]bool{}
	for _, name := range kept {
		not[name] = true
		if node := now.state.Nodes[name]; node != nil && node.Zone != "" {
			inZone[node.Zone]++
		}
	}
	type candidate struct {
		name string
		free float64
	}
	var candidates []candidate
	for _, name := range now.names {
		room := now.room[name]
		if byCapacity {
			room = now.capacity[name]
		}
		if !not[name] && !closed[name] && task.Demand.Fits(room) {
			candidates = append(candidates, candidate{name, freeShare(now.room[name], now.capacity[name])})
		}
	}
	sort.SliceStable(candidates, func(i, j int) bool { return candidates[i].free > candidates[j].free })
	var nodes []string
	for _, candidate := range candidates {
		if len(nodes) == count {
			break
		}
		zone := now.state.Nodes[candidate.name].Zone
		if zone != "" && inZone[zone] >= zoneHolds {
			continue
		}
		inZone[zone]++
		nodes = append(nodes, candidate.name)
	}
	if len(nodes) < count {
		return nil
	}
	return nodes
}

// freeShare is how much of a node is free in the kind of which the least is.
func freeShare(room, capacity Resources) float64 {
	return 1 - capacity.Minus(room).DominantShare(capacity)
}
