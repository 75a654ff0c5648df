// Package controller runs one of TRIPOD's controllers over a shared log: it reads the agreed entries from the daemon of its own host, carries out
// what [allocation.Controller] decides, and proposes what it says.
//
// Flow: entries, looks at the cluster and results of binds come on channels into one loop, which gives them to the decisions and carries out
// what these answer: proposals and binds on goroutines of their own, whose number the decisions bound.
// Not here: what is decided (allocation), what a cluster is.
package controller

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/log"
)

const (
	// entriesAhead are read and wait for the loop; more are not read.
	entriesAhead = 256
	// answer is how long a cluster may take for one request.
	answer = 10 * time.Second
	// pause is between two tries to read the log, or to look: nothing tells when that may go well.
	pause = 100 * time.Millisecond
)

// Cluster is where copies run.
type Cluster interface {
	// Look returns what the cluster looks like. It may wait for news, for a moment. Where copies are is no older than the moment at which it was told of this
	// entry, the newest that may have changed that; it is told of no older one later.
	Look(ctx context.Context, newest uint64) (allocation.Cluster, error)
	// Bind and Unbind carry out an effect, as [allocation.Effect] says. An error means that nobody knows what came of it.
	Bind(ctx context.Context, bind allocation.BindTask) (allocation.Outcome, error)
	Unbind(ctx context.Context, binding allocation.Binding) (allocation.Outcome, error)
}

// Beside is a cluster that places tasks with R = 1 by itself, within what the leading controller leaves.
type Beside interface {
	// Judge calls judge with what applications have of such tasks, and places none while it runs. What it returns is what is left for them from then on; where an
	// application is not in it, none of its tasks is placed.
	Judge(judge func(beside map[string]allocation.Resources) map[string]allocation.Room)
}

// Config is what a controller needs.
type Config struct {
	// Name tells it from the others.
	Name string
	// Log is the shared log's name.
	Log     string
	Client  *log.Client
	Cluster Cluster
	// Beside may be left out.
	Beside Beside
	Timing allocation.Timing
	// Say is told what happens, a line at a time.
	Say func(line string)
	// Leads is told when this controller begins to lead, and when it leads no more; it may be left out.
	Leads func(leads bool)
	// Waits is told again and again, while this controller leads, which tasks wait and why; it may be left out. It is not to change the map.
	Waits func(waits map[string]error)
	// Offers is told likewise what each application is offered, and where the rest of its quota is.
	Offers func(offers map[string]allocation.Offer)
}

// read is an entry, or the state to begin with.
type read struct {
	index uint64
	entry allocation.Entry
	state *allocation.State
}

type seen struct {
	asOf    uint64
	cluster allocation.Cluster
}

type did struct {
	effect  allocation.Effect
	outcome allocation.Outcome
}

// controller is what its goroutines share.
type controller struct {
	Config
	ctx     context.Context
	begun   time.Time
	applied atomic.Uint64
	// moved is the newest entry that may have changed where copies are; it is written before applied, and read after it.
	moved   atomic.Uint64
	entries chan read
	looks   chan seen
	results chan did
	failed  chan error
	writer  *log.Writer
	decides *allocation.Controller
	// led is what was told of leading last; only the loop uses it.
	led bool
}

// Run runs until the context ends, or until it cannot go on.
func Run(ctx context.Context, config Config) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	life, err := newLife()
	if err != nil {
		return err
	}
	controller := &controller{
		Config: config, ctx: ctx, begun: time.Now(),
		entries: make(chan read, entriesAhead), looks: make(chan seen), results: make(chan did),
		failed: make(chan error, 1),
		// A name is one writer's; this one has never been.
		writer: config.Client.NewWriter(config.Log, proposer(config.Name, life), 1),
	}
	defer controller.writer.Close()
	controller.decides = allocation.NewController(config.Name, life, config.Timing, allocation.NewState(), 0, 0)
	caughtUp := make(chan struct{})
	go controller.readLog(caughtUp)
	go controller.lookAround()
	return controller.loop(caughtUp)
}

func newLife() (uint64, error) {
	var bytes [8]byte
	_, err := rand.Read(bytes[:])
	return binary.BigEndian.Uint64(bytes[:]), err
}

// proposer is the name by which a controller writes. Its life alone tells it from all others, so that a name may be cut that is longer than a log takes: a Kubernetes
// node's may be.
func proposer(name string, life uint64) string {
	alone := fmt.Sprintf("-%016x", life)
	if most := log.MostNameBytes - len(alone); len(name) > most {
		name = strings.ToValidUTF8(name[:most], "")
	}
	return name + alone
}

func (controller *controller) now() time.Duration { return time.Since(controller.begun) }

// loop gives the decisions what happens. They decide nothing before all that was agreed is read.
func (controller *controller) loop(caughtUp <-chan struct{}) error {
	ticker := time.NewTicker(controller.Timing.Alive / 2)
	defer ticker.Stop()
	ready := false
	for {
		select {
		case <-controller.ctx.Done():
			return controller.ctx.Err()
		case err := <-controller.failed:
			return err
		case <-caughtUp:
			caughtUp, ready = nil, true
			controller.Say("has read what is agreed")
		case item := <-controller.entries:
			if err := controller.take(item); err != nil {
				return err
			}
		case seen := <-controller.looks:
			controller.decides.Saw(controller.now(), seen.asOf, seen.cluster)
		case did := <-controller.results:
			controller.decides.Did(controller.now(), did.effect, did.outcome)
		case <-ticker.C:
		}
		controller.tellLead()
		if !ready || len(controller.entries) > 0 {
			continue
		}
		for _, effect := range controller.step() {
			go controller.carryOut(effect)
		}
		if controller.decides.Leads() {
			controller.tell()
		}
	}
}

func (controller *controller) step() []allocation.Effect {
	if controller.Beside == nil {
		return controller.decides.Step(controller.now())
	}
	var effects []allocation.Effect
	controller.Beside.Judge(func(beside map[string]allocation.Resources) map[string]allocation.Room {
		controller.decides.Beside(beside)
		effects = controller.decides.Step(controller.now())
		return controller.decides.Rooms(controller.now())
	})
	return effects
}

// tellLead tells when this controller begins to lead, and when it leads no more: by what it has read, an entry or a whole state, and by the clock, since one that is cut
// off from its log reads nothing of another one that leads.
func (controller *controller) tellLead() {
	leads := controller.decides.MayLead(controller.now())
	if leads == controller.led {
		return
	}
	controller.led = leads
	controller.Say(map[bool]string{true: "leads", false: "leads no more"}[leads])
	if controller.Config.Leads != nil {
		controller.Config.Leads(leads)
	}
}

// tell tells what only the leading controller knows.
func (controller *controller) tell() {
	if controller.Config.Waits != nil {
		controller.Config.Waits(controller.decides.Waits())
	}
	if controller.Config.Offers != nil {
		state := controller.decides.State()
		offers := make(map[string]allocation.Offer, len(state.Applications))
		for name := range state.Applications {
			offers[name] = state.Offer(name)
		}
		controller.Config.Offers(offers)
	}
}

func (controller *controller) take(item read) error {
	if item.state != nil {
		life, err := newLife()
		if err != nil {
			return err
		}
		controller.Say(fmt.Sprintf("begins with the checkpoint that is whole at entry %d", item.index))
		controller.decides = allocation.NewController(controller.Name, life, controller.Timing, item.state, item.index, controller.now())
		controller.moved.Store(item.index)
		controller.applied.Store(item.index)
		return nil
	}
	for _, refusal := range controller.decides.Agreed(controller.now(), item.index, item.entry) {
		controller.Say(fmt.Sprintf("entry %d by %s: change %d does nothing: %v", item.index, item.entry.By, refusal.Change, refusal.Why))
	}
	if slices.ContainsFunc(item.entry.Changes, allocation.Change.MovesCopies) {
		controller.moved.Store(item.index)
	}
	controller.applied.Store(item.index)
	return nil
}

// carryOut does what was decided, and says what became of it.
func (controller *controller) carryOut(effect allocation.Effect) {
	if effect.Propose != nil {
		// It is agreed when it is read.
		if _, err := controller.writer.Propose(controller.ctx, effect.Propose.Encode()); err != nil && controller.ctx.Err() == nil {
			controller.fail(fmt.Errorf("log '%s': %w", controller.Log, err))
		}
		return
	}
	ctx, end := context.WithTimeout(controller.ctx, answer)
	defer end()
	var outcome allocation.Outcome
	var err error
	if effect.Bind != nil {
		outcome, err = controller.Cluster.Bind(ctx, *effect.Bind)
	} else {
		outcome, err = controller.Cluster.Unbind(ctx, *effect.Unbind)
	}
	if err != nil {
		controller.Say(fmt.Sprintf("the cluster: %v", err))
		outcome = allocation.Failed
		controller.rest()
	}
	select {
	case controller.results <- did{effect, outcome}:
	case <-controller.ctx.Done():
	}
}

func (controller *controller) fail(err error) {
	select {
	case controller.failed <- err:
	default:
	}
}

// rest waits a little before something is tried again.
func (controller *controller) rest() {
	select {
	case <-time.After(pause):
	case <-controller.ctx.Done():
	}
}

func (controller *controller) lookAround() {
	said := ""
	for controller.ctx.Err() == nil {
		asOf := controller.applied.Load()
		ctx, end := context.WithTimeout(controller.ctx, answer)
		cluster, err := controller.Cluster.Look(ctx, controller.moved.Load())
		end()
		if err != nil {
			if problem := fmt.Sprintf("the cluster: %v", err); problem != said && controller.ctx.Err() == nil {
				said = problem
				controller.Say(problem)
			}
			controller.rest()
			continue
		}
		select {
		case controller.looks <- seen{asOf, cluster}:
		case <-controller.ctx.Done():
		}
	}
}

// readLog reads the log for ever: from the first entry, or, where that is not kept any more, from a checkpoint.
func (controller *controller) readLog(caughtUp chan<- struct{}) {
	reader := &reader{controller: controller, next: 1}
	follow, said := false, ""
	for controller.ctx.Err() == nil {
		err := controller.Client.Read(controller.ctx, controller.Log, reader.next, follow, reader.take)
		var later allocation.ErrLater
		switch {
		case errors.As(err, &later):
			controller.fail(err)
			return
		case errors.Is(err, log.ErrCompacted):
			status, err := controller.Client.Status(controller.ctx, controller.Log)
			if err == nil {
				reader.next, reader.loader = status.First, allocation.NewLoader(status.First)
				continue
			}
			controller.Say(err.Error())
		case err != nil:
			if problem := fmt.Sprintf("log '%s': %v", controller.Log, err); problem != said && controller.ctx.Err() == nil {
				said = problem
				controller.Say(problem)
			}
		case !follow && reader.loader == nil:
			follow = true
			close(caughtUp)
			continue
		case !follow:
			controller.fail(fmt.Errorf("log '%s' keeps no whole checkpoint: make a new log, and then the Pods of all copies anew (docs/kubernetes.md, Pending)", controller.Log))
			return
		}
		controller.rest()
	}
}

// reader makes entries of what is read.
type reader struct {
	controller *controller
	next       uint64
	loader     *allocation.Loader
}

func (reader *reader) take(kept log.Entry) error {
	entry, err := allocation.Decode(kept.Data)
	var later allocation.ErrLater
	if errors.As(err, &later) {
		return err
	}
	reader.next = kept.Index + 1
	if err != nil {
		reader.controller.Say(fmt.Sprintf("entry %d is left out: %v", kept.Index, err))
		return nil
	}
	item := read{index: kept.Index, entry: entry}
	if reader.loader != nil {
		if item.state, err = reader.loader.Take(kept.Index, entry); err != nil || item.state == nil {
			return err
		}
		reader.loader = nil
	}
	select {
	case reader.controller.entries <- item:
		return nil
	case <-reader.controller.ctx.Done():
		return reader.controller.ctx.Err()
	}
}
