package allocation

import (
	"errors"
	"fmt"
	"math/rand"
	"sort"
	"strings"
	"time"
)

// world is a model of everything around three controllers, with a seed: the log, the cluster, time, and what fails. Its log agrees on what is
// proposed in any order; its nodes have only so much room. It keeps its own count of what must never be.
type world struct {
	random *rand.Rand
	now    time.Duration
	// pace is the longest time between two things that happen.
	pace  time.Duration
	log   []indexed
	index uint64
	// cut is how many entries of the log are not kept any more.
	cut   int
	procs []*process

	nodes        map[string]*modelNode
	applications []Application
	wanted       map[string]Task
	arrived      []string
	newest       map[[2]interface{}]uint64
	// served are tasks that have had all their copies bound at once.
	served map[string]bool

	// beside are tasks with R = 1 that the cluster places by itself, by application; heldUp counts those that were not let in.
	beside       map[string][]Resources
	came, heldUp int
	// told is how often what was placed so, and not nothing, was what is agreed of it.
	told int

	// faults: what this world may do.
	pauses, nodeDeaths, controllerDeaths, failures bool
	// misfits: not every node can run every task (unfit), and any node may be silent for a while, and run nothing new.
	misfits bool
	unfit   map[string]map[string]string
	silent  map[string]bool
	// barred counts how often a node was closed to a task, misplaced what was to go where it cannot run, and silenced what went to a node that had just become silent.
	barred, misplaced, silenced int
	// settling is when nothing more comes.
	settling bool
	// each is looked at after every step.
	each func() error
	// office is the first one that there was.
	office uint64

	// What nodes refused that the allocation must not have asked for.
	twins, noRoom, resized             int
	kills, pausesDone, deaths, refused int
}

// modelCheckpoint is small, so that there are many.
const modelCheckpoint = 60

type process struct {
	name       string
	controller *Controller
	read       int
	proposals  []Entry
	effects    []Effect
	// rooms is what it has left, the last time that it led and decided.
	rooms  map[string]Room
	alive  bool
	paused bool
	wakeAt time.Duration
}

type modelNode struct {
	Node
	alive bool
	bound map[Binding]Resources
}

func (node *modelNode) room() Resources {
	room := node.Capacity
	for _, demand := range node.bound {
		room = room.Minus(demand)
	}
	return room
}

// bindings are in an order that a seed repeats.
func (node *modelNode) bindings() (all []Binding) {
	for binding := range node.bound {
		all = append(all, binding)
	}
	sort.Slice(all, func(i, j int) bool {
		one, other := all[i], all[j]
		if one.Task != other.Task {
			return one.Task < other.Task
		}
		return one.Copy < other.Copy || one.Copy == other.Copy && one.Ticket < other.Ticket
	})
	return all
}

func newWorld(seed int64, controllers int) *world {
	random := rand.New(rand.NewSource(seed))
	world := &world{
		random: random, nodes: map[string]*modelNode{}, wanted: map[string]Task{},
		newest: map[[2]interface{}]uint64{}, served: map[string]bool{}, beside: map[string][]Resources{}, unfit: map[string]map[string]string{}, silent: map[string]bool{},
		pace: time.Duration(2+random.Intn(30)) * time.Millisecond,
	}
	zones := random.Intn(5)
	for at := 0; at < 4+random.Intn(9); at++ {
		node := Node{Name: fmt.Sprintf("node-%02d", at)}
		if zones > 0 && random.Intn(6) > 0 {
			node.Zone = fmt.Sprintf("zone-%d", random.Intn(zones))
		}
		node.Capacity = Resources{int64(1000 + random.Intn(8)*1000), int64(1024 + random.Intn(16)*1024), int64(random.Intn(3) * 100000)}
		world.nodes[node.Name] = &modelNode{node, true, map[Binding]Resources{}}
	}
	for at := 0; at < 1+random.Intn(4); at++ {
		quota := Resources{int64(2000 + random.Intn(20)*1000), int64(2048 + random.Intn(40)*1024), int64(random.Intn(5) * 100000)}
		name := fmt.Sprintf("application-%d", at)
		world.applications = append(world.applications, Application{Name: name, Quota: quota, MostStrength: 1 + random.Intn(controllers)})
	}
	for at := 0; at < controllers; at++ {
		world.procs = append(world.procs, &process{name: string(rune('a' + at))})
		world.start(world.procs[at])
	}
	return world
}

// start begins a controller as its program does: from the first entry, or, if that was cut away, from a checkpoint.
func (world *world) start(process *process) {
	process.alive, process.paused, process.effects, process.rooms = true, false, nil, nil
	process.read = world.cut
	begin := func(state *State, applied uint64) {
		process.controller = NewController(process.name, world.random.Uint64(), DefaultTiming, state, applied, world.now)
		process.controller.every = modelCheckpoint
	}
	if world.cut == 0 {
		begin(NewState(), 0)
		return
	}
	loader := NewLoader(world.log[world.cut].index)
	for process.read < len(world.log) {
		entry := world.log[process.read]
		process.read++
		state, err := loader.Take(entry.index, entry.entry)
		if err != nil {
			panic(err)
		}
		if state != nil {
			begin(state, entry.index)
			return
		}
	}
	panic("no checkpoint is kept")
}

// agree puts the next proposal of a process into the log.
func (world *world) agree(process *process) {
	if len(process.proposals) == 0 {
		return
	}
	// As it goes through the log: as bytes.
	entry, err := Decode(process.proposals[0].Encode())
	if err != nil {
		panic(err)
	}
	process.proposals = process.proposals[1:]
	world.index += 1 + uint64(world.random.Intn(2))
	world.log = append(world.log, indexed{world.index, entry})
}

func (world *world) look() Cluster {
	var cluster Cluster
	for _, name := range world.names() {
		node := world.nodes[name]
		if node.alive {
			cluster.Nodes = append(cluster.Nodes, node.Node)
		}
		cluster.Bound = append(cluster.Bound, node.bindings()...)
	}
	beside := world.besideNow()
	for _, application := range world.applications {
		application.Beside = beside[application.Name]
		cluster.Applications = append(cluster.Applications, application)
	}
	for _, name := range world.arrived {
		if task, wanted := world.wanted[name]; wanted {
			cluster.Tasks = append(cluster.Tasks, task)
		}
	}
	if world.misfits {
		cluster.Unfit = map[string]map[string]string{}
		for _, task := range cluster.Tasks {
			cluster.Unfit[task.Name] = world.unfitNow(task.Name)
		}
	}
	return cluster
}

func (world *world) names() []string {
	var names []string
	for name := range world.nodes {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// bind is what a cluster does: it looks at the copy's newest ticket, at whether it is wanted, and at the room; nothing else.
func (world *world) bind(bind BindTask) Outcome {
	node := world.nodes[bind.Node]
	key := [2]interface{}{bind.Task.Name, bind.Copy}
	if _, there := node.bound[bind.Binding]; there {
		return Done
	}
	if _, wanted := world.wanted[bind.Task.Name]; !wanted || !node.alive || world.newest[key] >= bind.Ticket {
		return Refused
	}
	if world.unfit[bind.Task.Name][bind.Node] != "" {
		world.misplaced++
	}
	if world.silent[bind.Node] {
		world.silenced++
		return Refused
	}
	for other := range node.bound {
		if other.Task == bind.Binding.Task {
			world.twins++
			return Refused
		}
	}
	if !bind.Task.Demand.Fits(node.room()) {
		world.noRoom++
		return Refused
	}
	// An older place of the same copy is taken away with it.
	for _, other := range world.nodes {
		for binding := range other.bound {
			if binding.Task == bind.Binding.Task && binding.Copy == bind.Copy {
				delete(other.bound, binding)
			}
		}
	}
	world.newest[key] = bind.Ticket
	node.bound[bind.Binding] = bind.Task.Demand
	return Done
}

func (world *world) carryOut(effect Effect) Outcome {
	if world.failures && world.random.Intn(30) == 0 {
		return Failed
	}
	outcome := Done
	if effect.Unbind != nil {
		binding := *effect.Unbind
		key := [2]interface{}{binding.Task, binding.Copy}
		delete(world.nodes[binding.Node].bound, binding)
		if world.newest[key] < binding.Ticket {
			world.newest[key] = binding.Ticket
		}
	} else {
		outcome = world.bind(*effect.Bind)
		if outcome == Refused {
			world.refused++
		}
	}
	if world.failures && world.random.Intn(30) == 0 {
		return Failed
	}
	return outcome
}

// act lets one process do one thing.
func (world *world) act(process *process) error {
	world.now += time.Duration(world.random.Intn(int(world.pace)))
	if !process.alive {
		return nil
	}
	if process.paused {
		if world.now < process.wakeAt {
			return nil
		}
		process.paused = false
	}
	controller := process.controller
	switch choice := world.random.Intn(10); {
	case choice < 4:
		if process.read == len(world.log) {
			break
		}
		entry := world.log[process.read]
		process.read++
		if err := world.places(entry.entry, controller.Agreed(world.now, entry.index, entry.entry)); err != nil {
			return err
		}
		if err := controller.State().Check(); err != nil {
			return fmt.Errorf("controller %s after entry %d: %w", process.name, entry.index, err)
		}
	case choice < 6:
		world.agree(process)
	case choice < 8:
		if len(process.effects) == 0 {
			break
		}
		at := world.random.Intn(len(process.effects))
		effect := process.effects[at]
		process.effects = append(process.effects[:at:at], process.effects[at+1:]...)
		controller.Did(world.now, effect, world.carryOut(effect))
	case choice < 9:
		controller.Saw(world.now, controller.Applied(), world.look())
	default:
		world.single(process)
	}
	controller.Beside(world.besideNow())
	defer func() { process.rooms = controller.Rooms(world.now) }()
	for _, effect := range controller.Step(world.now) {
		if effect.Propose != nil {
			if len(effect.Propose.Encode()) > 256<<10 {
				return errors.New("an entry that no log takes")
			}
			process.proposals = append(process.proposals, *effect.Propose)
		} else {
			process.effects = append(process.effects, effect)
		}
	}
	if len(process.proposals) > 1 || len(process.effects) > mostBinds {
		return fmt.Errorf("controller %s has %d entries and %d binds under way", process.name, len(process.proposals), len(process.effects))
	}
	return nil
}

// single is a task with R = 1 that the cluster places by itself, if the leading controller leaves so much.
func (world *world) single(process *process) {
	name := world.applications[world.random.Intn(len(world.applications))].Name
	needs := Resources{int64(100 + world.random.Intn(10)*100), int64(128 + world.random.Intn(10)*128), int64(world.random.Intn(2) * 1000)}
	room, known := process.rooms[name]
	switch {
	case !known || world.settling:
	case needs.Fits(room.Offers(world.besideNow()[name])):
		world.came++
		world.beside[name] = append(world.beside[name], needs)
	default:
		world.heldUp++
	}
}

func (world *world) besideNow() map[string]Resources {
	now := map[string]Resources{}
	for name, all := range world.beside {
		for _, one := range all {
			now[name] = now[name].Plus(one)
		}
	}
	return now
}

// endSingle ends one of those that the cluster has placed by itself.
func (world *world) endSingle() {
	name := world.applications[world.random.Intn(len(world.applications))].Name
	if all := world.beside[name]; len(all) > 0 {
		at := world.random.Intn(len(all))
		world.beside[name] = append(all[:at:at], all[at+1:]...)
	}
}

// withinQuotas says whether no application has more than its quota, by what the leading controller knows to be agreed. It holds under one leader; of what the one
// before has let in, the next one hears when it looks.
func (world *world) withinQuotas() error {
	for _, process := range world.procs {
		number := process.controller.State().Office.Number
		if world.office == 0 {
			world.office = number
		}
		if number != 0 && number != world.office {
			world.each = nil
			return nil
		}
	}
	for _, process := range world.procs {
		if state := process.controller.State(); process.controller.Leads() {
			beside := world.besideNow()
			for name, application := range state.Applications {
				if beside[name] != (Resources{}) && beside[name] == application.Beside {
					world.told++
				}
				if has := state.used[name].Plus(beside[name]); !has.Fits(application.Quota) {
					return fmt.Errorf("application %s has %v, %v of it beside, and its quota is %v", name, has, beside[name], application.Quota)
				}
			}
		}
	}
	return nil
}

// submit makes a task wanted.
func (world *world) submit() {
	application := world.applications[world.random.Intn(len(world.applications))]
	task := Task{
		Name: fmt.Sprintf("task-%04d", len(world.arrived)), Application: application.Name,
		Strength: 1 + world.random.Intn(application.MostStrength),
		Demand:   Resources{int64(100 + world.random.Intn(20)*100), int64(128 + world.random.Intn(20)*128), int64(world.random.Intn(2) * 1000)},
	}
	world.limit(task.Name)
	world.wanted[task.Name] = task
	world.arrived = append(world.arrived, task.Name)
}

// fault does one of the things that go wrong, or come and go.
func (world *world) fault() {
	process := world.procs[world.random.Intn(len(world.procs))]
	node := world.nodes[world.names()[world.random.Intn(len(world.nodes))]]
	switch world.random.Intn(13) {
	case 0, 1, 2, 3:
		world.submit()
	case 4, 5:
		world.endOne(false)
		world.endSingle()
	case 6:
		if world.controllerDeaths && process.alive {
			world.kills++
			process.alive = false
			// What it proposed may be agreed all the same.
			if world.random.Intn(2) == 0 {
				world.agree(process)
			}
			process.proposals = nil
		}
	case 7, 8:
		if !process.alive {
			world.start(process)
		}
	case 9:
		if world.pauses && process.alive && !process.paused {
			world.pausesDone++
			process.paused, process.wakeAt = true, world.now+time.Duration(world.random.Intn(60))*time.Second
		}
	case 10:
		if !node.alive {
			node.alive = true
		} else if world.nodeDeaths {
			world.deaths++
			node.alive = false
			// Either it has died, or it is cut off and its copies run on.
			if world.random.Intn(2) == 0 {
				node.bound = map[Binding]Resources{}
			}
		}
	case 11:
		for _, binding := range node.bindings() {
			if world.nodeDeaths && world.random.Intn(8) == 0 {
				delete(node.bound, binding)
				break
			}
		}
	case 12:
		world.resizeOne()
	}
}

// resizeOne gives a task that has been placed another R > 1; of a smaller one, whoever runs the copies takes away what is beyond it.
func (world *world) resizeOne() {
	var names []string
	for _, name := range world.arrived {
		if task, wanted := world.wanted[name]; wanted && task.Strength > 1 && world.procs[0].controller.State().Tasks[name] != nil {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return
	}
	task := world.wanted[names[world.random.Intn(len(names))]]
	most := 1
	for _, application := range world.applications {
		if application.Name == task.Application {
			most = application.MostStrength
		}
	}
	task.Strength = 2 + world.random.Intn(most-1)
	world.wanted[task.Name] = task
	delete(world.served, task.Name)
	world.resized++
	for _, node := range world.nodes {
		for binding := range node.bound {
			if binding.Task == task.Name && binding.Copy >= task.Strength {
				delete(node.bound, binding)
			}
		}
	}
}

// endOne ends a task that has had all its copies, or any that has been placed.
func (world *world) endOne(any bool) {
	var names []string
	state := world.procs[0].controller.State()
	for name := range world.wanted {
		if world.served[name] || any && state.Tasks[name] != nil {
			names = append(names, name)
		}
	}
	if len(names) > 0 {
		sort.Strings(names)
		delete(world.wanted, names[world.random.Intn(len(names))])
	}
}

// look for what must never be, at the nodes themselves.
func (world *world) check() error {
	copies := map[string]int{}
	for name, node := range world.nodes {
		tasks := map[string]bool{}
		for binding := range node.bound {
			if tasks[binding.Task] {
				return fmt.Errorf("two copies of %s on %s", binding.Task, name)
			}
			tasks[binding.Task] = true
			copies[binding.Task]++
		}
		if !(Resources{}).Fits(node.room()) {
			return fmt.Errorf("more on %s than it has", name)
		}
	}
	for name, count := range copies {
		if task := world.wanted[name]; task.Name != "" && count == task.Strength {
			world.served[name] = true
		}
	}
	return nil
}

// describe is for whoever looks for a fault.
func (world *world) describe() string {
	var out strings.Builder
	for _, process := range world.procs {
		controller := process.controller
		fmt.Fprintf(&out, "%s: read %d of %d, leads %v, says %v, facts %v, under way %v, ahead %v, told %v, full %v\n",
			process.name, process.read, len(world.log), controller.Leads(), controller.saying, controller.facts,
			controller.underWay, controller.ahead, controller.told, controller.full)
		if controller.Leads() {
			planner := controller.planner
			fmt.Fprintf(&out, "aside for %q: %v, passed over: %v, waits: %v\n", planner.asideFor, planner.aside, planner.passed, controller.waits)
		}
	}
	state := world.procs[0].controller.State()
	for name, task := range world.wanted {
		fmt.Fprintf(&out, "%v: %v (could be placed: %v)\n", task, state.Tasks[name], newView(state, nil, nil).possible(task, world.unfit[task.Name]))
	}
	for name, node := range world.nodes {
		fmt.Fprintf(&out, "%s: alive %v, %v, room %v, has %v\n", name, node.alive, state.Nodes[name], state.Room(name), node.bound)
	}
	for _, application := range world.applications {
		fmt.Fprintf(&out, "%s: %+v\n", application.Name, state.Offer(application.Name))
	}
	return out.String()
}
