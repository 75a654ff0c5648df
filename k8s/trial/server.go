// Package trial is a cluster for tests and for trying: one process keeps in memory what is wanted, which nodes there are and what is bound on
// them, and answers controllers over HTTP on a Unix socket. It runs nothing.
//
// It decides what a cluster has to decide by itself, since words of controllers may come late: a bind is refused if the copy is known by a newer
// ticket, if the task is not wanted, if the node has another copy of it, or if it has no room.
// Not here: Kubernetes, whose API server and kubelets decide the same.
package trial

import (
	"encoding/json"
	"net"
	"net/http"
	"sort"
	"sync"
	"time"

	"dunlin.dev/k8s/allocation"
)

// news is how long a look waits for some.
const news = 300 * time.Millisecond

// Happened is something that a controller asked for, and what it was told.
type Happened struct {
	By      string
	Bind    bool
	Binding allocation.Binding
	Outcome allocation.Outcome
	// Why it was refused.
	Why string
}

// Server is the cluster.
type Server struct {
	mutex        sync.Mutex
	changed      *sync.Cond
	revision     uint64
	nodes        map[string]*node
	applications map[string]allocation.Application
	tasks        []allocation.Task
	newest       map[copyOf]uint64
	happened     []Happened
	waiting      []Happened
	held         func(by string, binding allocation.Binding) bool
}

type copyOf struct {
	task string
	copy int
}

type node struct {
	allocation.Node
	bound map[allocation.Binding]allocation.Resources
}

// NewServer returns an empty one.
func NewServer() *Server {
	server := &Server{nodes: map[string]*node{}, applications: map[string]allocation.Application{}, newest: map[copyOf]uint64{}}
	server.changed = sync.NewCond(&server.mutex)
	return server
}

// Change changes the cluster, and tells everybody who waits.
func (server *Server) change(change func()) {
	server.mutex.Lock()
	defer server.mutex.Unlock()
	change()
	server.revision++
	server.changed.Broadcast()
}

// SetNode adds a node, or changes it.
func (server *Server) SetNode(wanted allocation.Node) {
	server.change(func() {
		if known := server.nodes[wanted.Name]; known != nil {
			known.Node = wanted
			return
		}
		server.nodes[wanted.Name] = &node{wanted, map[allocation.Binding]allocation.Resources{}}
	})
}

// DropNode is a node's death, with all that it runs.
func (server *Server) DropNode(name string) {
	server.change(func() { delete(server.nodes, name) })
}

// SetApplication adds an application, or changes it.
func (server *Server) SetApplication(application allocation.Application) {
	server.change(func() { server.applications[application.Name] = application })
}

// Submit makes a task wanted.
func (server *Server) Submit(task allocation.Task) {
	server.change(func() { server.tasks = append(server.tasks, task) })
}

// End makes a task unwanted.
func (server *Server) End(name string) {
	server.change(func() {
		for at, task := range server.tasks {
			if task.Name == name {
				server.tasks = append(server.tasks[:at:at], server.tasks[at+1:]...)
				return
			}
		}
	})
}

// Hold makes binds and unbinds that it says true of wait until it is given another one.
func (server *Server) Hold(held func(by string, binding allocation.Binding) bool) {
	server.change(func() { server.held = held })
}

// State is what can be waited for.
type State struct {
	allocation.Cluster
	// Happened is all that was asked for and answered; Waiting is held.
	Happened, Waiting []Happened
}

// Until waits until the cluster is so, for at most so long, and returns how it is at last.
func (server *Server) Until(patience time.Duration, is func(State) bool) (State, bool) {
	late := time.AfterFunc(patience, func() { server.change(func() {}) })
	defer late.Stop()
	begun := time.Now()
	server.mutex.Lock()
	defer server.mutex.Unlock()
	for {
		state := State{server.look(), server.happened, server.waiting}
		if is(state) {
			return state, true
		}
		if time.Since(begun) >= patience {
			return state, false
		}
		server.changed.Wait()
	}
}

func (server *Server) look() allocation.Cluster {
	var cluster allocation.Cluster
	for _, node := range server.nodes {
		cluster.Nodes = append(cluster.Nodes, node.Node)
		for binding := range node.bound {
			cluster.Bound = append(cluster.Bound, binding)
		}
	}
	for _, application := range server.applications {
		cluster.Applications = append(cluster.Applications, application)
	}
	sort.Slice(cluster.Nodes, func(i, j int) bool { return cluster.Nodes[i].Name < cluster.Nodes[j].Name })
	sort.Slice(cluster.Applications, func(i, j int) bool { return cluster.Applications[i].Name < cluster.Applications[j].Name })
	cluster.Tasks = append(cluster.Tasks, server.tasks...)
	return cluster
}

// request and reply are the bodies, in JSON.
type request struct {
	By string
	// After is the revision that is known.
	After   uint64
	Bind    *allocation.BindTask
	Binding allocation.Binding
}

type reply struct {
	Revision uint64
	Cluster  allocation.Cluster
	Outcome  allocation.Outcome
}

// Serve answers until the listener is closed.
func (server *Server) Serve(listener net.Listener) error {
	return (&http.Server{Handler: server, ReadHeaderTimeout: 10 * time.Second}).Serve(listener)
}

// ServeHTTP answers one request.
func (server *Server) ServeHTTP(out http.ResponseWriter, in *http.Request) {
	var asked request
	if err := json.NewDecoder(http.MaxBytesReader(out, in.Body, 1<<20)).Decode(&asked); err != nil {
		http.Error(out, err.Error(), http.StatusBadRequest)
		return
	}
	var said reply
	switch in.URL.Path {
	case "/look":
		said = server.answerLook(asked)
	case "/bind":
		if asked.Bind == nil {
			http.Error(out, "nothing to bind", http.StatusBadRequest)
			return
		}
		said.Outcome = server.answerBind(in, asked)
	case "/unbind":
		said.Outcome = server.answerUnbind(in, asked)
	default:
		http.NotFound(out, in)
		return
	}
	if in.Context().Err() == nil {
		_ = json.NewEncoder(out).Encode(said) // whoever asked may have gone
	}
}

func (server *Server) answerLook(asked request) reply {
	late := time.AfterFunc(news, func() {
		server.mutex.Lock()
		defer server.mutex.Unlock()
		server.changed.Broadcast()
	})
	defer late.Stop()
	begun := time.Now()
	server.mutex.Lock()
	defer server.mutex.Unlock()
	for server.revision == asked.After && time.Since(begun) < news {
		server.changed.Wait()
	}
	return reply{Revision: server.revision, Cluster: server.look()}
}

// wait holds a request back while it is held.
func (server *Server) wait(in *http.Request, happened Happened) {
	gone := in.Context().Done()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-gone:
			server.change(func() {})
		case <-stop:
		}
	}()
	server.mutex.Lock()
	if server.held != nil && server.held(happened.By, happened.Binding) {
		server.waiting = append(server.waiting, happened)
		server.changed.Broadcast()
	}
	for server.held != nil && server.held(happened.By, happened.Binding) && in.Context().Err() == nil {
		server.changed.Wait()
	}
	server.mutex.Unlock()
}

func (server *Server) answerBind(in *http.Request, asked request) allocation.Outcome {
	happened := Happened{By: asked.By, Bind: true, Binding: asked.Bind.Binding}
	server.wait(in, happened)
	server.change(func() {
		if happened.Why = server.bind(*asked.Bind); happened.Why != "" {
			happened.Outcome = allocation.Refused
		}
		server.happened = append(server.happened, happened)
	})
	return happened.Outcome
}

func (server *Server) answerUnbind(in *http.Request, asked request) allocation.Outcome {
	happened := Happened{By: asked.By, Binding: asked.Binding}
	server.wait(in, happened)
	server.change(func() {
		if node := server.nodes[asked.Binding.Node]; node != nil {
			delete(node.bound, asked.Binding)
		}
		of := copyOf{asked.Binding.Task, asked.Binding.Copy}
		if server.newest[of] < asked.Binding.Ticket {
			server.newest[of] = asked.Binding.Ticket
		}
		server.happened = append(server.happened, happened)
	})
	return happened.Outcome
}

// bind returns why it is refused, if it is.
func (server *Server) bind(bind allocation.BindTask) string {
	node := server.nodes[bind.Node]
	if node == nil {
		return "there is no such node"
	}
	if _, there := node.bound[bind.Binding]; there {
		return ""
	}
	of := copyOf{bind.Binding.Task, bind.Copy}
	if server.newest[of] >= bind.Ticket {
		return "the copy is known by a newer ticket"
	}
	wanted := false
	for _, task := range server.tasks {
		wanted = wanted || task.Name == bind.Binding.Task
	}
	if !wanted {
		return "the task is not wanted"
	}
	room := node.Capacity
	for other, demand := range node.bound {
		room = room.Minus(demand)
		if other.Task == bind.Binding.Task {
			return "the node has a copy of the task"
		}
	}
	if !bind.Task.Demand.Fits(room) {
		return "the node has no room"
	}
	for _, other := range server.nodes {
		for binding := range other.bound {
			if binding.Task == of.task && binding.Copy == of.copy {
				delete(other.bound, binding)
			}
		}
	}
	server.newest[of] = bind.Ticket
	node.bound[bind.Binding] = bind.Task.Demand
	return ""
}
