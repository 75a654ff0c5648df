// Package allocation decides which copy of which task runs on which node, bound by which controller: TRIPOD's replication-aware
// resource allocation (GAIA proposal, section 2.2.2).
//
//   - It decides: what an application may still place ([State.Offer]), the places of a task's copies ([Planner.Plan]), what an agreed
//     entry changes ([State.Apply]), and what a controller does next ([Controller.Step]).
//   - Flow: S1 nodes report -> S2 quotas' free parts are divided by R and offered -> S3 tasks say their R: one with R = 1 is placed at
//     once -> S4 for the others the leading controller chooses the places and puts them into the entry; each controller that reads it
//     binds its own copies.
//   - Invariants, checked by [State.Check] and in tests by a model of the cluster: 1. no two copies of a task are on one node. 2. nothing is
//     decided that does not fit: into its node, its application's quota, and its offer. 3. a task has places for all its copies or for
//     none when it is assigned. 4. equal entries make equal states. 5. who leads no more decides nothing.
//   - Not here: clocks, sockets, the log, Kubernetes. Time and what the cluster looks like are arguments.
package allocation

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
)

// Phase is how far a copy is.
type Phase string

// A copy without a place is missing. It is assigned by an agreed entry, bound when its controller has said so, and ending from when its
// task ends until its controller says that it is gone.
const (
	Missing  Phase = "missing"
	Assigned Phase = "assigned"
	Bound    Phase = "bound"
	Ending   Phase = "ending"
)

// Copy is one of a task's R copies.
type Copy struct {
	Place
	Phase Phase `json:"phase"`
	// Ticket is the index of the entry that gave it this place: what a cluster knows a late word by.
	Ticket uint64 `json:"ticket"`
	// Since is the index of the entry that made it what it is.
	Since uint64 `json:"since"`
}

// TaskState is a task that has been placed.
type TaskState struct {
	Task
	Copies []Copy `json:"copies"`
	Ending bool   `json:"ending,omitempty"`
}

// ApplicationState is an application and what was given back to it.
type ApplicationState struct {
	Application
	// GivenBack is, over all its tasks, what had been held for copies that they turned out not to have.
	GivenBack Resources `json:"givenBack"`
}

// Office is who leads. Number is the index of the entry that said so.
type Office struct {
	Leader string `json:"leader"`
	Number uint64 `json:"number"`
}

// State is what the agreed entries so far say. It is the same on every controller.
type State struct {
	Office       Office                       `json:"office"`
	Nodes        map[string]*Node             `json:"nodes"`
	Applications map[string]*ApplicationState `json:"applications"`
	Tasks        map[string]*TaskState        `json:"tasks"`
	// Controllers are those that have ever said something, and whether each lives.
	Controllers map[string]bool `json:"controllers"`

	// Sums over the tasks' copies, kept by hold and drop.
	onNode map[string]Resources
	used   map[string]Resources
	// undivided is for the comparison: offers as they are without a reservation for copies.
	undivided bool
}

// NewState returns the state before the first entry.
func NewState() *State {
	return &State{
		Nodes:        map[string]*Node{},
		Applications: map[string]*ApplicationState{},
		Tasks:        map[string]*TaskState{},
		Controllers:  map[string]bool{},
		onNode:       map[string]Resources{},
		used:         map[string]Resources{},
	}
}

// Refusal says that a change of an entry did nothing, and why.
type Refusal struct {
	Change int
	Why    error
}

// Apply folds an agreed entry in. What it refuses every controller refuses.
func (state *State) Apply(index uint64, entry Entry) []Refusal {
	state.Controllers[entry.By] = true
	var refusals []Refusal
	for at, change := range entry.Changes {
		if err := state.change(index, entry, change); err != nil {
			refusals = append(refusals, Refusal{at, err})
		}
	}
	return refusals
}

var (
	errNotInOffice = errors.New("its proposer does not lead any more")
	errNoTask      = errors.New("there is no such task")
	errLate        = errors.New("the copy has another place by now")
)

func (state *State) change(index uint64, entry Entry, change Change) error {
	switch {
	case change.Lead != nil:
		if *change.Lead != state.Office.Number {
			return fmt.Errorf("controller '%s' took the office before", state.Office.Leader)
		}
		state.Office = Office{entry.By, index}
		return nil
	case change.Placed != nil:
		return state.placed(index, *change.Placed)
	case change.Bound != nil:
		return state.word(*change.Bound, func(_ *TaskState, copy *Copy) {
			if copy.Phase == Assigned {
				copy.Phase, copy.Since = Bound, index
			}
		})
	case change.Refused != nil:
		return state.word(*change.Refused, state.loseCopy)
	case change.Gone != nil:
		return state.word(*change.Gone, state.loseCopy)
	}
	if entry.By != state.Office.Leader || entry.Office != state.Office.Number {
		return errNotInOffice
	}
	return state.decide(index, change)
}

// decide applies what the leading controller has decided.
func (state *State) decide(index uint64, change Change) error {
	switch {
	case change.SetNode != nil:
		node := *change.SetNode
		if err := node.Capacity.fault(); err != nil {
			return err
		}
		state.Nodes[node.Name] = &node
	case change.DropNode != "":
		state.dropNode(change.DropNode)
	case change.SetApplication != nil:
		return state.setApplication(*change.SetApplication)
	case change.DropApplication != "":
		if state.used[change.DropApplication] != (Resources{}) {
			return errors.New("the application still has tasks")
		}
		delete(state.Applications, change.DropApplication)
	case change.DropController != "":
		if change.DropController == state.Office.Leader {
			return errors.New("the leading controller is alive")
		}
		if _, known := state.Controllers[change.DropController]; known {
			state.Controllers[change.DropController] = false
		}
	case change.Assign != nil:
		return state.assign(index, *change.Assign)
	case change.Move != nil:
		return state.move(index, *change.Move)
	case change.Return != nil:
		return state.comesBack(index, *change.Return)
	case change.Reassign != nil:
		return state.reassign(*change.Reassign)
	case change.Resize != nil:
		return state.resize(*change.Resize)
	case change.End != "":
		task := state.Tasks[change.End]
		if task == nil {
			return errNoTask
		}
		state.end(task)
	default:
		return errors.New("a change without a word")
	}
	return nil
}

func (state *State) setApplication(application Application) error {
	if err := application.Quota.fault(); err != nil {
		return err
	}
	if application.MostStrength < 1 || application.MostStrength > MostStrength {
		return fmt.Errorf("R is from 1 to %d, not %d", MostStrength, application.MostStrength)
	}
	if err := application.Beside.fault(); err != nil {
		return err
	}
	known := state.Applications[application.Name]
	if known == nil {
		known = &ApplicationState{}
		state.Applications[application.Name] = known
	}
	// What has come since the last word had R copies held for it, and needs one (S3).
	come := application.Beside.Minus(known.Beside).OrNothing()
	known.GivenBack = known.GivenBack.Plus(come.Times(application.MostStrength - 1))
	known.Application = application
	return nil
}

func (state *State) assign(index uint64, assignment Assignment) error {
	if assignment.Strength == 1 {
		return errors.New("a task with R = 1 is placed at once")
	}
	if err := state.MayPlace(assignment.Task); err != nil {
		return err
	}
	task := &TaskState{Task: assignment.Task}
	if len(assignment.Places) != assignment.Strength {
		return fmt.Errorf("%d places for %d copies", len(assignment.Places), assignment.Strength)
	}
	if assignment.Zones < 0 {
		return fmt.Errorf("%d zones", assignment.Zones)
	}
	bindsAtMost, zoneHolds := share(assignment.Strength, len(state.living())), share(assignment.Strength, state.zonesOf(assignment))
	binds := map[string]int{}
	for _, place := range assignment.Places {
		if err := state.mayTake(task, place); err != nil {
			return err
		}
		if zone := state.Nodes[place.Node].Zone; !state.zoneHasRoom(task, zone, zoneHolds) {
			return fmt.Errorf("zone '%s' has its share of the task's copies", zone)
		}
		if binds[place.Controller]++; binds[place.Controller] > bindsAtMost {
			return fmt.Errorf("controller '%s' would bind more than its share of the copies", place.Controller)
		}
		task.Copies = append(task.Copies, Copy{place, Assigned, index, index})
	}
	state.take(task)
	return nil
}

// placed records a fact, so it asks nothing about room.
func (state *State) placed(index uint64, placed Placed) error {
	if placed.Strength != 1 {
		return errors.New("a task with R > 1 is assigned by agreement")
	}
	if err := placed.Demand.fault(); err != nil {
		return err
	}
	if state.Nodes[placed.Node] == nil {
		return fmt.Errorf("there is no node '%s'", placed.Node)
	}
	if state.Applications[placed.Application] == nil {
		return fmt.Errorf("there is no application '%s'", placed.Application)
	}
	now := Copy{placed.Place, Bound, placed.Ticket, index}
	task := state.Tasks[placed.Name]
	if task == nil {
		state.take(&TaskState{Task: placed.Task, Copies: []Copy{now}})
		return nil
	}
	if task.Strength != 1 || task.Ending || task.Copies[0].Phase != Missing || task.Copies[0].Ticket >= placed.Ticket {
		return errLate
	}
	task.Copies[0] = now
	state.hold(task, placed.Node, 1)
	return nil
}

func (state *State) move(index uint64, move Move) error {
	task := state.Tasks[move.Task]
	if task == nil || move.Copy < 0 || move.Copy >= len(task.Copies) {
		return errNoTask
	}
	if task.Ending || task.Copies[move.Copy].Phase != Missing {
		return errLate
	}
	if err := state.mayTake(task, move.Place); err != nil {
		return err
	}
	task.Copies[move.Copy] = Copy{move.Place, Assigned, index, index}
	state.hold(task, move.Node, 1)
	return nil
}

func (state *State) reassign(reassign Reassign) error {
	task := state.Tasks[reassign.Task]
	if task == nil || reassign.Copy < 0 || reassign.Copy >= len(task.Copies) {
		return errNoTask
	}
	if !state.Controllers[reassign.Controller] {
		return fmt.Errorf("controller '%s' is not alive", reassign.Controller)
	}
	task.Copies[reassign.Copy].Controller = reassign.Controller
	return nil
}

// MayPlace says why a task may not be placed now, if it may not: its shape, its R, its application's offer and quota.
func (state *State) MayPlace(task Task) error {
	if state.Tasks[task.Name] != nil {
		return errors.New("the task has been placed")
	}
	if err := task.Demand.fault(); err != nil {
		return err
	}
	application := state.Applications[task.Application]
	if application == nil {
		return fmt.Errorf("there is no application '%s'", task.Application)
	}
	if task.Name == "" || task.Strength < 1 || task.Strength > application.MostStrength {
		return fmt.Errorf("R is from 1 to %d for application '%s', not %d", application.MostStrength, task.Application, task.Strength)
	}
	// The paper: R is no more than the number of controllers.
	if task.Strength > len(state.Controllers) {
		return fmt.Errorf("R = %d needs as many controllers; there are %d", task.Strength, len(state.Controllers))
	}
	return state.offers(task, state.Offer(task.Application).Free)
}

// offers says why a task is beyond its application's offer, if it is, with so much of its quota free.
func (state *State) offers(task Task, free Resources) error {
	if state.undivided {
		if needs := task.Demand.Times(task.Strength); !needs.Fits(free) {
			return fmt.Errorf("the copies need %v; application '%s' has %v", needs, task.Application, free)
		}
		return nil
	}
	offered := free.DividedBy(state.Applications[task.Application].MostStrength)
	if !task.Demand.Fits(offered) {
		return fmt.Errorf("a copy needs %v; application '%s' is offered %v", task.Demand, task.Application, offered)
	}
	return nil
}

// mayTake says why a copy of the task may not go there, beside those that have places (invariants 1 and 2).
func (state *State) mayTake(task *TaskState, place Place) error {
	if err := state.mayBeOn(task, place); err != nil {
		return err
	}
	if room := state.Room(place.Node); !task.Demand.Fits(room) {
		return fmt.Errorf("node '%s' has room for %v, a copy needs %v", place.Node, room, task.Demand)
	}
	return nil
}

// mayBeOn says why no copy of the task may be there, whatever room there is.
func (state *State) mayBeOn(task *TaskState, place Place) error {
	if state.Nodes[place.Node] == nil {
		return fmt.Errorf("there is no node '%s'", place.Node)
	}
	if !state.Controllers[place.Controller] {
		return fmt.Errorf("controller '%s' is not alive", place.Controller)
	}
	for _, copy := range task.Copies {
		if copy.Node == place.Node {
			return fmt.Errorf("node '%s' has a copy of the task", place.Node)
		}
	}
	return nil
}

// zoneHasRoom says whether one more copy of a task that is being assigned may go into this zone, which holds so many.
func (state *State) zoneHasRoom(task *TaskState, zone string, holds int) bool {
	there := 0
	for _, copy := range task.Copies {
		if state.Nodes[copy.Node].Zone == zone {
			there++
		}
	}
	return zone == "" || there < holds
}

// zonesOf are those among which a task's copies are divided: no more than have a node large enough, and no more than the leading controller has found with one
// that can run it.
func (state *State) zonesOf(assignment Assignment) int {
	zones := state.zones(assignment.Task, nil)
	if assignment.Zones > 0 {
		zones = min(zones, assignment.Zones)
	}
	return zones
}

// zones are how many have a node large enough that is not unfit; a node without a zone is one of its own. A zone holds its share of a task's copies when it is assigned.
func (state *State) zones(task Task, unfit map[string]string) int {
	zones, alone := map[string]bool{}, 0
	for name, node := range state.Nodes {
		switch {
		case unfit[name] != "" || !task.Demand.Fits(node.Capacity):
		case node.Zone == "":
			alone++
		default:
			zones[node.Zone] = true
		}
	}
	return len(zones) + alone
}

// share is the most that one of so many has of a whole that is divided evenly.
func share(whole, among int) int {
	if among == 0 {
		return whole
	}
	return (whole + among - 1) / among
}

func (state *State) living() []string {
	var names []string
	for name, alive := range state.Controllers {
		if alive {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	return names
}

// Room is what a node has for further copies; below nothing if a fact has taken more than there was.
func (state *State) Room(node string) Resources {
	known := state.Nodes[node]
	if known == nil {
		return Resources{}
	}
	return known.Capacity.Minus(state.onNode[node])
}

// take adds a task, and gives back what was held for copies that it has not (S3).
func (state *State) take(task *TaskState) {
	state.Tasks[task.Name] = task
	state.used[task.Application] = state.used[task.Application].Plus(task.Demand.Times(task.Strength))
	if application := state.Applications[task.Application]; application != nil {
		unneeded := application.MostStrength - task.Strength
		if unneeded > 0 {
			application.GivenBack = application.GivenBack.Plus(task.Demand.Times(unneeded))
		}
	}
	for _, copy := range task.Copies {
		state.hold(task, copy.Node, 1)
	}
}

// hold counts a copy on a node in, or with -1 out.
func (state *State) hold(task *TaskState, node string, count int) {
	held := state.onNode[node].Plus(task.Demand.Times(count))
	if held == (Resources{}) {
		delete(state.onNode, node)
	} else {
		state.onNode[node] = held
	}
}

// loseCopy takes a copy's place away; a task that ends goes with its last one.
func (state *State) loseCopy(task *TaskState, copy *Copy) {
	state.hold(task, copy.Node, -1)
	copy.Node, copy.Controller, copy.Phase = "", "", Missing
	if task.Ending {
		state.forgetEnded(task)
	}
}

func (state *State) end(task *TaskState) {
	task.Ending = true
	for at := range task.Copies {
		if task.Copies[at].Phase != Missing {
			task.Copies[at].Phase = Ending
		}
	}
	state.forgetEnded(task)
}

func (state *State) forgetEnded(task *TaskState) {
	for _, copy := range task.Copies {
		if copy.Phase != Missing {
			return
		}
	}
	delete(state.Tasks, task.Name)
	left := state.used[task.Application].Minus(task.Demand.Times(task.Strength))
	if left == (Resources{}) {
		delete(state.used, task.Application)
	} else {
		state.used[task.Application] = left
	}
}

func (state *State) dropNode(name string) {
	delete(state.Nodes, name)
	for _, task := range state.sortedTasks() {
		for at := range task.Copies {
			if task.Copies[at].Node == name {
				state.loseCopy(task, &task.Copies[at])
			}
		}
	}
}

// word applies what became of a copy, unless it has another place by now.
func (state *State) word(word Word, apply func(*TaskState, *Copy)) error {
	task := state.Tasks[word.Task]
	if task == nil || word.Copy < 0 || word.Copy >= len(task.Copies) {
		return errNoTask
	}
	copy := &task.Copies[word.Copy]
	if copy.Phase == Missing || copy.Ticket != word.Ticket {
		return errLate
	}
	apply(task, copy)
	return nil
}

func (state *State) sortedTasks() []*TaskState {
	tasks := make([]*TaskState, 0, len(state.Tasks))
	for _, task := range state.Tasks {
		tasks = append(tasks, task)
	}
	sort.Slice(tasks, func(i, j int) bool { return tasks[i].Name < tasks[j].Name })
	return tasks
}

// Encode returns the whole state, for a checkpoint. Equal states have equal bytes.
func (state *State) Encode() []byte {
	data, err := json.Marshal(state)
	if err != nil {
		panic(err) // plain data: a programmer's error
	}
	return data
}

// Sum is a short name of the state.
func (state *State) Sum() [sha256.Size]byte { return sha256.Sum256(state.Encode()) }

// DecodeState returns the state of a checkpoint, if it is one.
func DecodeState(data []byte) (*State, error) {
	state := NewState()
	if err := json.Unmarshal(data, state); err != nil {
		return nil, fmt.Errorf("no checkpoint: %w", err)
	}
	for _, task := range state.Tasks {
		if task == nil || len(task.Copies) != task.Strength {
			return nil, errors.New("no checkpoint: a task without its copies")
		}
		state.used[task.Application] = state.used[task.Application].Plus(task.Demand.Times(task.Strength))
		for _, copy := range task.Copies {
			if copy.Phase != Missing {
				state.hold(task, copy.Node, 1)
			}
		}
	}
	if err := state.Check(); err != nil {
		return nil, fmt.Errorf("no checkpoint: %w", err)
	}
	return state, nil
}

// Check says what is wrong with the state, if anything is: a programmer's error, or a checkpoint's.
func (state *State) Check() error {
	onNode, used := map[string]Resources{}, map[string]Resources{}
	for name, task := range state.Tasks {
		if name != task.Name || len(task.Copies) != task.Strength {
			return fmt.Errorf("task '%s' has %d copies", name, len(task.Copies))
		}
		nodes := map[string]bool{}
		for _, copy := range task.Copies {
			if (copy.Phase == Missing) != (copy.Node == "") {
				return fmt.Errorf("task '%s': a copy is %s on node '%s'", name, copy.Phase, copy.Node)
			}
			if copy.Phase == Missing {
				continue
			}
			if nodes[copy.Node] || state.Nodes[copy.Node] == nil {
				return fmt.Errorf("task '%s': node '%s' has two copies, or is not there", name, copy.Node)
			}
			nodes[copy.Node] = true
			onNode[copy.Node] = onNode[copy.Node].Plus(task.Demand)
		}
		used[task.Application] = used[task.Application].Plus(task.Demand.Times(task.Strength))
	}
	if err := sameSums("node", onNode, state.onNode); err != nil {
		return err
	}
	return sameSums("application", used, state.used)
}

func sameSums(of string, counted, kept map[string]Resources) error {
	for _, pair := range [][2]map[string]Resources{{counted, kept}, {kept, counted}} {
		for name, sum := range pair[0] {
			if pair[1][name] != sum {
				return fmt.Errorf("%s '%s': its copies have %v, its sum is %v", of, name, counted[name], kept[name])
			}
		}
	}
	return nil
}
