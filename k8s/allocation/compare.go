package allocation

import (
	"fmt"
	"math/rand"
	"sort"
)

// Scheme is a way to give tasks places, for the comparison in docs/kubernetes.md.
type Scheme string

// Tripod divides offers and assigns all copies or none. Undivided is the same without the division. AntiAffinity is what plain
// kube-scheduler does with R pods that repel each other: each is placed by itself when it fits.
const (
	Tripod       Scheme = "offers divided by R"
	Undivided    Scheme = "no reservation"
	AntiAffinity Scheme = "anti-affinity, pod by pod"
)

// Workload is what all schemes get.
type Workload struct {
	Seed  int64
	Nodes int
	// Ticks is for how long tasks arrive; after as long again it is looked at what has never had all its copies.
	Ticks int
	// Load is what arrives, as a share of what the nodes could do at most.
	Load float64
	// Services never end; then the result is how it is at last.
	Services bool
}

// Result is what became of it.
type Result struct {
	Scheme Scheme
	// Useful is the share of the nodes' memory, over the ticks in which tasks arrive, that was of tasks with all their copies; InVain
	// that of copies that waited for their siblings.
	Useful, InVain float64
	// Single and Replicated are tasks with R = 1 and more: how many arrived, how many had all their copies at last, and how many ticks
	// these waited.
	Single, Replicated Served
	// Jammed are tasks that hold some places, and never get the others.
	Jammed int
}

// Served counts tasks.
type Served struct {
	Arrived, Placed int
	Waited          int
}

// MeanWait is in ticks.
func (served Served) MeanWait() float64 {
	if served.Placed == 0 {
		return 0
	}
	return float64(served.Waited) / float64(served.Placed)
}

// job is a task with its time.
type job struct {
	Task
	arrives, runs int
	begun         int
}

const comparedApplications = 4

// comparedStrength is the largest R of each application.
const comparedStrength = 3

func (workload Workload) jobs() (nodes []Node, applications []Application, jobs []*job) {
	random := rand.New(rand.NewSource(workload.Seed))
	var whole Resources
	for at := 0; at < workload.Nodes; at++ {
		node := Node{
			Name: fmt.Sprintf("node-%03d", at), Zone: fmt.Sprintf("zone-%d", at%3),
			Capacity: Resources{int64(8000 + random.Intn(3)*8000), int64(32768 + random.Intn(3)*16384), 1 << 30},
		}
		nodes, whole = append(nodes, node), whole.Plus(node.Capacity)
	}
	for at := 0; at < comparedApplications; at++ {
		applications = append(applications, Application{Name: fmt.Sprintf("application-%d", at), Quota: whole.DividedBy(comparedApplications), MostStrength: comparedStrength})
	}
	// Half of the tasks have R = 1; the applications' critical ones have 2 or 3.
	offered, wanted := 0.0, workload.Load*float64(whole.MemoryMiB)*float64(workload.Ticks)
	for offered < wanted {
		next := &job{runs: 20 + random.Intn(180), arrives: random.Intn(workload.Ticks), begun: -1}
		if workload.Services {
			next.runs = 2 * workload.Ticks
		}
		next.Strength = []int{1, 1, 2, 3}[random.Intn(4)]
		next.Application = applications[random.Intn(len(applications))].Name
		next.Demand = Resources{int64(500 * (1 + random.Intn(8))), int64(2048 * (1 + random.Intn(8))), 0}
		offered += float64(next.Demand.MemoryMiB) * float64(next.Strength) * float64(min(next.runs, workload.Ticks))
		jobs = append(jobs, next)
	}
	sort.SliceStable(jobs, func(i, j int) bool { return jobs[i].arrives < jobs[j].arrives })
	for at := range jobs {
		jobs[at].Name = fmt.Sprintf("task-%06d", at)
	}
	return nodes, applications, jobs
}

func min(one, other int) int {
	if one < other {
		return one
	}
	return other
}

// Compare plays a workload under a scheme.
func Compare(workload Workload, scheme Scheme) Result {
	nodes, applications, jobs := workload.jobs()
	var placer placer
	if scheme == AntiAffinity {
		placer = newPods(nodes, applications)
	} else {
		placer = newAgreed(nodes, applications, scheme == Undivided)
	}
	result := Result{Scheme: scheme}
	whole := 0.0
	for _, node := range nodes {
		whole += float64(node.Capacity.MemoryMiB)
	}
	ends := map[int][]*job{}
	var queue []*job
	for tick, next := 0, 0; tick < 2*workload.Ticks; tick++ {
		for _, ended := range ends[tick] {
			placer.end(ended.Task)
		}
		for ; next < len(jobs) && jobs[next].arrives <= tick; next++ {
			queue = append(queue, jobs[next])
		}
		waiting := make([]Task, 0, len(queue))
		for _, job := range queue {
			waiting = append(waiting, job.Task)
		}
		begun := placer.place(waiting)
		left := queue[:0]
		for _, job := range queue {
			if begun[job.Name] {
				job.begun = tick
				ends[tick+job.runs] = append(ends[tick+job.runs], job)
			} else {
				left = append(left, job)
			}
		}
		queue = left
		useful, inVain := placer.memory()
		switch {
		case workload.Services:
			result.Useful, result.InVain = float64(useful)/whole, float64(inVain)/whole
		case tick < workload.Ticks:
			result.Useful += float64(useful) / whole / float64(workload.Ticks)
			result.InVain += float64(inVain) / whole / float64(workload.Ticks)
		}
	}
	for _, job := range jobs {
		served := &result.Replicated
		if job.Strength == 1 {
			served = &result.Single
		}
		served.Arrived++
		if job.begun >= 0 {
			served.Placed++
			served.Waited += job.begun - job.arrives
		}
	}
	result.Jammed = placer.jammed()
	return result
}

// placer is a scheme at work.
type placer interface {
	// place returns which of the waiting tasks have all their copies now.
	place(waiting []Task) map[string]bool
	end(Task)
	// memory that tasks with all their copies have, and what others have.
	memory() (useful, inVain int64)
	// jammed is how many tasks have some of their places.
	jammed() int
}

// agreed is this package's own scheme.
type agreed struct {
	state   *State
	planner *Planner
	index   uint64
}

func newAgreed(nodes []Node, applications []Application, undivided bool) *agreed {
	agreed := &agreed{state: NewState(), planner: NewPlanner()}
	agreed.state.undivided = undivided
	zero := uint64(0)
	agreed.say(Change{Lead: &zero})
	for _, name := range []string{"b", "c", "a"} {
		agreed.index++
		agreed.state.Apply(agreed.index, Entry{By: name})
	}
	for at := range nodes {
		agreed.say(Change{SetNode: &nodes[at]})
	}
	for at := range applications {
		agreed.say(Change{SetApplication: &applications[at]})
	}
	return agreed
}

func (agreed *agreed) say(change Change) {
	agreed.index++
	entry := Entry{By: "a", Office: agreed.state.Office.Number, Changes: []Change{change}}
	if refusals := agreed.state.Apply(agreed.index, entry); refusals != nil {
		panic(refusals[0].Why)
	}
}

func (agreed *agreed) place(waiting []Task) map[string]bool {
	plan := agreed.planner.Plan(agreed.state, waiting, nil, nil)
	begun := map[string]bool{}
	for at, assignment := range plan.Assignments {
		agreed.say(Change{Assign: &plan.Assignments[at]})
		begun[assignment.Name] = true
	}
	for _, assignment := range plan.AtOnce {
		agreed.say(Change{Placed: &Placed{assignment.Task, assignment.Places[0], agreed.index}})
		begun[assignment.Name] = true
	}
	return begun
}

func (agreed *agreed) end(task Task) {
	tickets := agreed.state.Tasks[task.Name].Copies
	agreed.say(Change{End: task.Name})
	for at := 0; at < task.Strength; at++ {
		agreed.say(Change{Gone: &Word{task.Name, at, tickets[at].Ticket}})
	}
}

func (agreed *agreed) memory() (useful, inVain int64) {
	_, placed := agreed.state.Whole()
	return placed.MemoryMiB, 0
}

func (agreed *agreed) jammed() int { return 0 }

// pods is the plain scheduler: each copy is a pod in one queue, in the order of arrival, and goes to the freest node that has no other pod of
// its task, once its namespace's quota has room for it.
type pods struct {
	now     *view
	placed  map[string][]string
	waiting map[string]Task
}

func newPods(nodes []Node, applications []Application) *pods {
	// The same nodes, and the same choice among them.
	return &pods{now: newView(newAgreed(nodes, applications, true).state, nil, nil), placed: map[string][]string{}, waiting: map[string]Task{}}
}

func (pods *pods) place(waiting []Task) map[string]bool {
	begun := map[string]bool{}
	for _, task := range waiting {
		pods.waiting[task.Name] = task
		for len(pods.placed[task.Name]) < task.Strength && task.Demand.Fits(pods.now.free[task.Application]) {
			nodes := pods.now.pick(task, 1, pods.placed[task.Name], nil, share(task.Strength, pods.now.state.zones(task, nil)), false)
			if nodes == nil {
				break
			}
			pods.placed[task.Name] = append(pods.placed[task.Name], nodes[0])
			pods.count(task, nodes[0], 1)
		}
		if len(pods.placed[task.Name]) == task.Strength {
			begun[task.Name] = true
		}
	}
	return begun
}

func (pods *pods) count(task Task, node string, count int) {
	pods.now.room[node] = pods.now.room[node].Minus(task.Demand.Times(count))
	pods.now.free[task.Application] = pods.now.free[task.Application].Minus(task.Demand.Times(count))
}

func (pods *pods) end(task Task) {
	for _, node := range pods.placed[task.Name] {
		pods.count(task, node, -1)
	}
	delete(pods.placed, task.Name)
	delete(pods.waiting, task.Name)
}

func (pods *pods) memory() (useful, inVain int64) {
	for name, nodes := range pods.placed {
		task := pods.waiting[name]
		memory := task.Demand.MemoryMiB * int64(len(nodes))
		if len(nodes) == task.Strength {
			useful += memory
		} else {
			inVain += memory
		}
	}
	return useful, inVain
}

func (pods *pods) jammed() int {
	jammed := 0
	for name, nodes := range pods.placed {
		if len(nodes) > 0 && len(nodes) < pods.waiting[name].Strength {
			jammed++
		}
	}
	return jammed
}
