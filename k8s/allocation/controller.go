package allocation

import (
	"encoding/json"
	"sort"
	"time"
)

// Bounds of what a controller has under way.
const (
	// mostBinds are binds and unbinds under way.
	mostBinds = 64
	// mostFacts wait to be told.
	mostFacts = 4 * mostBinds
	// mostChangesBytes is of an entry's facts, and of its decisions; a log takes 256 KiB.
	mostChangesBytes = 96 << 10
	// checkpointEvery is after how many entries there is a checkpoint; a log keeps 10,000 entries.
	checkpointEvery = 1000
)

// Timing says how long silence may be.
type Timing struct {
	// Alive is how often a controller says something.
	Alive time.Duration
	// Dead is the silence after which it counts as dead.
	Dead time.Duration
}

// DefaultTiming is for controllers in one data centre.
var DefaultTiming = Timing{Alive: 500 * time.Millisecond, Dead: 3 * time.Second}

// Binding is a copy at a place, as a cluster knows it.
type Binding struct {
	Task   string `json:"task"`
	Copy   int    `json:"copy"`
	Node   string `json:"node"`
	Ticket uint64 `json:"ticket"`
}

// Cluster is what a controller sees when it looks: what is wanted and what is there (S1, S3).
type Cluster struct {
	// Nodes are those that are alive.
	Nodes        []Node
	Applications []Application
	// Tasks are all that are wanted, in the order of arrival, placed or not.
	Tasks []Task
	Bound []Binding
	// Wishes are of copies that have no node yet; one without a wish may go anywhere. A lost copy is placed by its wish, a task as a whole is not.
	Wishes []Wish
	// Unfit are, by task and by node, why a node cannot run a copy of it, whatever room it has. It is for tasks as a whole; a lost copy's is in its wish.
	Unfit map[string]map[string]string
}

// Wish says where a copy may go, as whoever made it has said.
type Wish struct {
	Task  string   `json:"task"`
	Copy  int      `json:"copy"`
	Nodes []string `json:"nodes"`
	// Unfit are those of them that cannot run it, and why.
	Unfit map[string]string `json:"unfit,omitempty"`
}

// Effect is one of these, for the shell to carry out.
type Effect struct {
	// Propose is an entry for the log. There is one under way at a time; it has come when [Controller.Agreed] has it.
	Propose *Entry
	// Bind makes a copy run at its place. A cluster refuses one whose ticket is older than what it knows of the copy, that is not wanted, or
	// for which the node has no room. Answered by [Controller.Did].
	Bind *BindTask
	// Unbind ends a copy there, if it is there with this ticket. Answered by [Controller.Did].
	Unbind *Binding
}

// BindTask is a bind with what the copy needs.
type BindTask struct {
	Binding
	Task Task `json:"of"`
}

// Outcome is what became of a bind or an unbind.
type Outcome int

// Failed means that nobody knows: it is tried again. Refused is final for this ticket.
const (
	Done Outcome = iota
	Refused
	Failed
)

// Controller is one of TRIPOD's controllers: it decides what to say and what to bind. It has no clock: now is since any moment in the past, and rises.
type Controller struct {
	name   string
	life   uint64
	number uint64
	timing Timing

	state     *State
	applied   uint64
	since     int // entries since the last checkpoint
	every     int // after so many there is another one
	parts     []Checkpoint
	planner   *Planner
	cluster   *Cluster
	wanted    map[string]Task
	lookAfter uint64

	// ran is how long this process has run, pauses left out: a controller that stood still has not found the others silent.
	ran, last time.Duration
	heard     map[string]time.Duration
	saidAt    time.Duration
	// lease is until when nobody else can have taken the office, by the clock: pauses count.
	lease time.Duration
	// leadsUntil is somewhat later, and before anybody else may take the office, too: what this one has begun to let in until then ends before.
	leadsUntil time.Duration
	saying     bool
	proposedAt time.Duration

	// Whether something has changed since it last looked for what to bind, and since it last planned.
	bindNews, planNews bool
	// beside is what the cluster places by itself, by application.
	beside map[string]Resources

	facts []Change
	// sent is the entry under way, and told the words that are in it or in facts.
	sent     Entry
	told     map[Word]bool
	underWay map[Binding]bool
	// failed are binds and unbinds of which nobody knows what became, and when they are tried again; retryAt is when the first own one is that waits for that.
	failed  map[Binding]failure
	retryAt time.Duration
	// next is the task at which the next look for what to bind begins: there was no room for it among those under way.
	next  string
	ahead map[string]Placed
	full  map[string]bool
	waits map[string]error
}

// NewController returns one that begins after the entry with this index, in the state that it leads to. Its life is a number that no other process
// of this name has had.
func NewController(name string, life uint64, timing Timing, state *State, applied uint64, now time.Duration) *Controller {
	return &Controller{
		name: name, life: life, timing: timing, state: state, applied: applied, planner: NewPlanner(), last: now,
		heard: map[string]time.Duration{}, told: map[Word]bool{}, underWay: map[Binding]bool{}, failed: map[Binding]failure{}, ahead: map[string]Placed{}, full: map[string]bool{},
		saidAt: -timing.Alive, every: checkpointEvery,
	}
}

// State is what is agreed, as far as this controller has read. It is not to be changed.
func (controller *Controller) State() *State { return controller.state }

// Applied is the index of the last entry that was read. A look at the cluster that begins now is as of here.
func (controller *Controller) Applied() uint64 { return controller.applied }

// Leads says whether it leads, as far as it has read.
func (controller *Controller) Leads() bool { return controller.state.Office.Leader == controller.name }

// MayLead says whether it leads and nobody else can: where it was not heard for a while, another one may have taken the office and it has not read that.
func (controller *Controller) MayLead(now time.Duration) bool {
	return controller.Leads() && now < controller.leadsUntil
}

// Waits says of each wanted task that is not placed why it waits, as the leading controller found last.
func (controller *Controller) Waits() map[string]error { return controller.waits }

func (controller *Controller) turn(now time.Duration) {
	passed := now - controller.last
	controller.last = now
	if passed > controller.timing.Alive {
		passed = controller.timing.Alive
	}
	controller.ran += passed
}

// Agreed takes the next entry of the log.
func (controller *Controller) Agreed(now time.Duration, index uint64, entry Entry) []Refusal {
	controller.turn(now)
	before := controller.state.Office
	refusals := controller.state.Apply(index, entry)
	controller.applied = index
	controller.bindNews = controller.bindNews || len(entry.Changes) > 0
	controller.planNews = controller.planNews || len(entry.Changes) > 0 || entry.By == controller.name
	controller.since++
	if entry.Checkpoint != nil && entry.Checkpoint.Part == entry.Checkpoint.Parts-1 {
		controller.since = 0
	}
	controller.heard[entry.By] = controller.ran
	if controller.state.Office != before {
		// What it saw before may lack what the last leader did at once.
		controller.lookAfter, controller.cluster = index, nil
		controller.ahead, controller.full, controller.planner = map[string]Placed{}, map[string]bool{}, NewPlanner()
		controller.parts = nil
	}
	if controller.saying && entry.By == controller.name && entry.Life == controller.life && entry.Number == controller.number {
		controller.saying = false
		controller.lease = controller.proposedAt + controller.timing.Dead/2
		controller.leadsUntil = controller.proposedAt + controller.timing.Dead*3/4
		for _, change := range controller.sent.Changes {
			if word := change.word(); word != nil {
				delete(controller.told, *word)
			}
			// Where it was refused, the next look finds the copy again.
			if placed := change.Placed; placed != nil && controller.ahead[placed.Name].Ticket == placed.Ticket {
				delete(controller.ahead, placed.Name)
			}
		}
	}
	return refusals
}

// Saw takes what the cluster looked like. asOf is what [Controller.Applied] said when the look began.
func (controller *Controller) Saw(now time.Duration, asOf uint64, cluster Cluster) {
	controller.turn(now)
	if asOf < controller.lookAfter {
		return
	}
	controller.cluster, controller.planNews = &cluster, true
	controller.wanted = map[string]Task{}
	for _, task := range cluster.Tasks {
		controller.wanted[task.Name] = task
	}
	controller.full = map[string]bool{}
	if controller.Leads() {
		controller.compare(asOf)
	}
}

// tell says a fact with the next entry, once; what there is no room for is found again by the next look.
func (controller *Controller) tell(fact Change) {
	word := fact.word()
	if len(controller.facts) >= mostFacts || controller.told[*word] {
		return
	}
	controller.told[*word] = true
	controller.facts = append(controller.facts, fact)
}

// word is what a fact is about.
func (change Change) word() *Word {
	switch {
	case change.Placed != nil:
		return &Word{change.Placed.Name, 0, change.Placed.Ticket}
	case change.Bound != nil:
		return change.Bound
	case change.Refused != nil:
		return change.Refused
	}
	return change.Gone
}

// Did takes what became of a bind or an unbind.
func (controller *Controller) Did(now time.Duration, effect Effect, outcome Outcome) {
	controller.turn(now)
	controller.bindNews, controller.planNews = true, true
	if effect.Unbind != nil {
		binding := *effect.Unbind
		delete(controller.underWay, binding)
		if outcome == Failed {
			controller.fails(binding, now)
		} else {
			delete(controller.failed, binding)
			controller.forget(binding)
			controller.tell(Change{Gone: &Word{binding.Task, binding.Copy, binding.Ticket}})
		}
		return
	}
	binding := effect.Bind.Binding
	delete(controller.underWay, binding)
	if outcome == Failed {
		controller.fails(binding, now)
	} else {
		delete(controller.failed, binding)
	}
	placed, atOnce := controller.ahead[binding.Task]
	atOnce = atOnce && placed.Ticket == binding.Ticket
	word := &Word{binding.Task, binding.Copy, binding.Ticket}
	switch {
	case outcome == Failed && atOnce:
		// It may be bound: the next look tells.
		delete(controller.ahead, binding.Task)
		controller.full[binding.Node] = true
	case outcome == Failed:
	case outcome == Done && effect.Bind.Task.Strength == 1:
		if !atOnce {
			placed = Placed{effect.Bind.Task, Place{binding.Node, controller.name}, binding.Ticket}
		}
		controller.tell(Change{Placed: &placed})
	case outcome == Done:
		controller.tell(Change{Bound: word})
	case atOnce:
		delete(controller.ahead, binding.Task)
		controller.full[binding.Node] = true
	case effect.Bind.Task.Strength > 1:
		controller.full[binding.Node] = true
		controller.tell(Change{Refused: word})
	}
}

// forget takes a binding that is gone out of what was seen.
func (controller *Controller) forget(gone Binding) {
	if controller.cluster == nil {
		return
	}
	for at, binding := range controller.cluster.Bound {
		if binding == gone {
			controller.cluster.Bound = append(controller.cluster.Bound[:at:at], controller.cluster.Bound[at+1:]...)
			return
		}
	}
}

// Beside takes what applications have now that the cluster has placed by itself. Between this, [Controller.Step] and [Controller.Rooms] the cluster is to place
// nothing, and afterwards no more than the rooms allow: then nothing is given twice.
func (controller *Controller) Beside(beside map[string]Resources) { controller.beside = beside }

// Rooms is what the leading controller leaves to each application. There are none before it knows what the cluster looks like, and none where somebody else may lead.
func (controller *Controller) Rooms(now time.Duration) map[string]Room {
	if !controller.MayLead(now) || controller.cluster == nil {
		return nil
	}
	taken := map[string]Resources{}
	take := func(task Task) {
		if known := controller.state.Tasks[task.Name]; known == nil {
			taken[task.Application] = taken[task.Application].Plus(task.Demand.Times(task.Strength))
		}
	}
	if controller.saying {
		for _, change := range controller.sent.Changes {
			switch {
			case change.Assign != nil:
				take(change.Assign.Task)
			case change.Resize != nil:
				if task := controller.state.Tasks[change.Resize.Task]; task != nil {
					taken[task.Application] = taken[task.Application].Plus(controller.state.more(*change.Resize))
				}
			}
		}
	}
	for _, placed := range controller.ahead {
		take(placed.Task)
	}
	rooms := make(map[string]Room, len(controller.state.Applications))
	for name, application := range controller.state.Applications {
		rooms[name] = Room{application.Quota.Minus(controller.state.used[name]).Minus(taken[name]), application.MostStrength}
	}
	return rooms
}

// Step says what to do now. It is to be called after each of the above, and at least every [Timing.Alive].
func (controller *Controller) Step(now time.Duration) []Effect {
	controller.turn(now)
	effects := controller.bindOwn(now, nil)
	if controller.saying {
		return effects
	}
	entry := Entry{By: controller.name}
	if checkpoint := controller.checkpoint(); checkpoint != nil {
		entry.Checkpoint = checkpoint
		return controller.say(now, entry, effects)
	}
	entry.Changes, controller.facts = cut(controller.facts)
	if controller.Leads() {
		entry.Office = controller.state.Office.Number
		var decisions []Change
		decisions, effects = controller.lead(now, effects)
		entry.Changes = append(entry.Changes, decisions...)
	} else if controller.silent(controller.state.Office.Leader) {
		number := controller.state.Office.Number
		entry.Changes = append(entry.Changes, Change{Lead: &number})
	}
	if len(entry.Changes) == 0 && controller.ran-controller.saidAt < controller.timing.Alive {
		return effects
	}
	return controller.say(now, entry, effects)
}

func (controller *Controller) say(now time.Duration, entry Entry, effects []Effect) []Effect {
	controller.number++
	entry.Life, entry.Number = controller.life, controller.number
	controller.saying, controller.sent, controller.saidAt, controller.proposedAt = true, entry, controller.ran, now
	return append(effects, Effect{Propose: &entry})
}

// checkpoint is the next part of one, if this controller leads and one is due.
func (controller *Controller) checkpoint() *Checkpoint {
	if !controller.Leads() {
		return nil
	}
	if len(controller.parts) == 0 {
		if controller.since < controller.every {
			return nil
		}
		controller.parts = Checkpoints(controller.state, controller.applied)
	}
	part := controller.parts[0]
	controller.parts = controller.parts[1:]
	return &part
}

// cut takes as many changes as half of an entry holds; the first it always takes.
func cut(changes []Change) (taken, rest []Change) {
	bytes := 0
	for at, change := range changes {
		data, err := json.Marshal(change)
		if err != nil {
			panic(err) // plain data: a programmer's error
		}
		if bytes += len(data); bytes > mostChangesBytes && at > 0 {
			return changes[:at], append([]Change(nil), changes[at:]...)
		}
	}
	return changes, nil
}

// silent says whether a controller counts as dead. If there is none, it is waited for, too.
func (controller *Controller) silent(name string) bool {
	if _, known := controller.heard[name]; !known {
		controller.heard[name] = controller.ran
	}
	return controller.ran-controller.heard[name] > controller.timing.Dead
}

// failure is how often in a row something has failed, and until when it waits.
type failure struct {
	times int
	until time.Duration
}

const (
	// retryAfter is how long a bind waits after it has failed once; twice as long after each further time, and no longer than mostRetry.
	retryAfter = 200 * time.Millisecond
	mostRetry  = 2 * time.Second
)

// fails notes that something has failed.
func (controller *Controller) fails(binding Binding, now time.Duration) {
	for old, failure := range controller.failed {
		// What is not tried any more.
		if failure.until+mostRetry < now && old != binding {
			delete(controller.failed, old)
		}
	}
	known := controller.failed[binding]
	wait := retryAfter
	for time := 0; time < known.times && wait < mostRetry; time++ {
		wait *= 2
	}
	if wait > mostRetry {
		wait = mostRetry
	}
	controller.failed[binding] = failure{known.times + 1, now + wait}
}

// mayTry says whether something has not failed a moment ago.
func (controller *Controller) mayTry(binding Binding, now time.Duration) bool {
	failure, known := controller.failed[binding]
	return !known || failure.until <= now
}

// bindOwn binds and ends the copies that are this controller's, as its own log says. What there is no room for among those under way comes first the next time: else
// those that fail again and again would take it for ever.
func (controller *Controller) bindOwn(now time.Duration, effects []Effect) []Effect {
	if !controller.bindNews && (controller.retryAt == 0 || now < controller.retryAt) {
		return effects
	}
	controller.bindNews, controller.retryAt = false, 0
	tasks := controller.state.sortedTasks()
	first := sort.Search(len(tasks), func(at int) bool { return tasks[at].Name >= controller.next })
	controller.next = ""
	for turn := range tasks {
		task := tasks[(first+turn)%len(tasks)]
		for at, copy := range task.Copies {
			if copy.Controller != controller.name || (copy.Phase != Assigned && copy.Phase != Ending) {
				continue
			}
			binding := Binding{task.Name, at, copy.Node, copy.Ticket}
			if controller.told[Word{task.Name, at, copy.Ticket}] || controller.underWay[binding] {
				continue
			}
			if !controller.mayTry(binding, now) {
				if until := controller.failed[binding].until; controller.retryAt == 0 || until < controller.retryAt {
					controller.retryAt = until
				}
				continue
			}
			if !controller.begin(binding) {
				// There is news when one of those has ended.
				controller.next = task.Name
				return effects
			}
			if copy.Phase == Assigned {
				effects = append(effects, Effect{Bind: &BindTask{binding, task.Task}})
			} else {
				effects = append(effects, Effect{Unbind: &binding})
			}
		}
	}
	return effects
}

// begin says whether a bind or an unbind may begin, and counts it.
func (controller *Controller) begin(binding Binding) bool {
	if controller.underWay[binding] || len(controller.underWay) >= mostBinds {
		return false
	}
	controller.underWay[binding] = true
	return true
}
