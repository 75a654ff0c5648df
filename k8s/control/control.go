// Package control asks a daemon of Dunlin's what a person asks it with 'dunlin': start a VM, end it, replicate it in another way, hand it over, and how
// everything is (docs/cluster.md says who may ask what).
//
// It talks to the daemon of its own host over the control socket; the daemon passes on what concerns a VM to the host that serves it.
// Invariants: 1. every call ends with its context. 2. a refusal is a [Refused], with the daemon's one line that says what to do.
//
// Not here: shared logs (dunlin.dev/log), and authentication: whoever may open the socket may do what the daemon's host.toml says.
package control

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"dunlin.dev/log/lines"
)

// Refused is a daemon's word that it did not do what it was asked for.
type Refused = lines.Refused

// Socket is where a daemon listens if its file does not say otherwise.
const Socket = lines.Socket

// Client asks one daemon.
type Client struct{ socket string }

// New returns a client of the daemon at this socket.
func New(socket string) *Client { return &Client{socket} }

// Host is how a host and its VMs are.
type Host struct {
	Host string `json:"host"`
	// KVM says whether a VM that asks for KVM gets it there; false also of a daemon that does not say it.
	KVM  bool `json:"kvm"`
	VMs  []VM `json:"vms"`
	Logs []struct {
		Hosts []Peer `json:"hosts"`
	} `json:"logs"`
}

// VM is one VM, as this host sees it.
type VM struct {
	Name string `json:"name"`
	// Role is "primary", "backup", "witness", or "none".
	Role string `json:"role"`
	// State is one word: "starting", "running", "joining", "alone", "quorum-lost", "waiting", "stopped", "stalled", "restarting", "failed", ...
	State string `json:"state"`
	// Why is the reason for it, where there is one.
	Why string `json:"why"`
	// Protected says whether a second complete copy exists.
	Protected bool   `json:"protected"`
	Policy    string `json:"policy"`
	// Leader is the host that leads the VM's group, if it is known: the one that serves it.
	Leader string `json:"leader"`
	Term   uint64 `json:"term"`
	Peers  []Peer `json:"peers"`
	// Standby is the host that takes a copy's host's part when that host stays away; nothing where there is none.
	Standby string `json:"standby"`
	// JoinProblem says why no backup joins.
	JoinProblem *struct {
		Why   string `json:"why"`
		Times uint32 `json:"times"`
	} `json:"join_problem"`
}

// Peer is another host of a group.
type Peer struct {
	Host      string `json:"host"`
	Connected bool   `json:"connected"`
	// Witness: it only agrees, and has no copy.
	Witness bool `json:"witness"`
}

// Event is something that happened on the daemon's host.
type Event struct {
	Seq    uint64 `json:"seq"`
	TimeMs int64  `json:"time_ms"`
	Host   string `json:"host"`
	VM     string `json:"vm"`
	// Kind is one word for it, as "took-over"; Text is the same for a person.
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// Time is when it happened, by that host's clock.
func (event Event) Time() time.Time { return time.UnixMilli(event.TimeMs) }

// Find returns the VM of this name.
func (host Host) Find(name string) (VM, bool) {
	for _, vm := range host.VMs {
		if vm.Name == name {
			return vm, true
		}
	}
	return VM{}, false
}

// Links are the other hosts that this one has to do with, and whether it is connected with them.
func (host Host) Links() map[string]bool {
	links := map[string]bool{}
	for _, vm := range host.VMs {
		for _, peer := range vm.Peers {
			links[peer.Host] = links[peer.Host] || peer.Connected
		}
	}
	for _, log := range host.Logs {
		for _, peer := range log.Hosts {
			if peer.Host != host.Host {
				links[peer.Host] = links[peer.Host] || peer.Connected
			}
		}
	}
	return links
}

// ask makes one request. What is said before "done" goes to each, which may end the conversation by an error.
func (client *Client) ask(ctx context.Context, request map[string]any, patient bool, each func(lines.Answer) error) error {
	talk, err := lines.Dial(ctx, client.socket)
	if err != nil {
		return fmt.Errorf("no daemon answers at %s: %w", client.socket, err)
	}
	defer talk.Close()
	defer talk.Until(ctx)()
	if patient {
		talk.Patiently()
	}
	err = talk.Say(request)
	for err == nil {
		var said lines.Answer
		if said, err = talk.Hear(); err != nil || said.Kind == "done" {
			break
		}
		err = each(said)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// order asks for something that may take long and that nothing is said about meanwhile.
func (client *Client) order(ctx context.Context, request map[string]any) error {
	return client.ask(ctx, request, true, func(lines.Answer) error { return nil })
}

// Status tells how the host and its VMs are.
func (client *Client) Status(ctx context.Context) (Host, error) {
	var host Host
	err := client.ask(ctx, map[string]any{"do": "status"}, false, func(said lines.Answer) error { return json.Unmarshal(said.Line, &host) })
	return host, err
}

// errEnough ends a conversation that has said what was wanted.
var errEnough = fmt.Errorf("enough")

// Version is the daemon's. It is said among what all hosts of the cluster say, so that a dead one makes it take longer.
func (client *Client) Version(ctx context.Context, host string) (string, error) {
	var version string
	err := client.ask(ctx, map[string]any{"do": "cluster"}, false, func(said lines.Answer) error {
		var member struct {
			Host    string `json:"host"`
			Version string `json:"version"`
		}
		if err := json.Unmarshal(said.Line, &member); err != nil {
			return err
		}
		if member.Host != host {
			return nil
		}
		version = member.Version
		return errEnough
	})
	if err == errEnough {
		err = nil
	}
	return version, err
}

// Follow calls each with what happens from now on until the context ends, the daemon is gone, or each returns an error; with nil where the status
// may have changed, and every five seconds.
func (client *Client) Follow(ctx context.Context, each func(*Event) error) error {
	request := map[string]any{"do": "events", "follow": true, "from_now": true}
	return client.ask(ctx, request, false, func(said lines.Answer) error {
		if said.Kind != "event" {
			return each(nil)
		}
		var event Event
		if err := json.Unmarshal(said.Line, &event); err != nil {
			return err
		}
		return each(&event)
	})
}

// Up starts a VM, by the text of its file. All its hosts are asked first, and nothing is started if one refuses. When it returns the VM is being started.
func (client *Client) Up(ctx context.Context, name, text string) error {
	return client.order(ctx, map[string]any{"do": "up", "text": text, "origin": name})
}

// Down ends a VM on all its hosts: its guest is asked to switch itself off, and with now it is not.
func (client *Client) Down(ctx context.Context, vm string, now bool) error {
	return client.order(ctx, map[string]any{"do": "down", "vm": vm, "now": now})
}

// Forget takes a VM away from this host alone. It is refused while somebody leads the VM's group.
func (client *Client) Forget(ctx context.Context, vm string) error {
	return client.order(ctx, map[string]any{"do": "down", "vm": vm, "now": true, "force": true})
}

// Policy replicates a VM in another way from now on.
func (client *Client) Policy(ctx context.Context, vm, policy string) error {
	return client.order(ctx, map[string]any{"do": "policy", "vm": vm, "policy": policy})
}

// Failover hands a VM over to its backup.
func (client *Client) Failover(ctx context.Context, vm string) error {
	return client.order(ctx, map[string]any{"do": "failover", "vm": vm})
}

// Place is a part in a VM: the second copy's, or the witness'.
type Place string

// The parts that another host can be given.
const (
	Backup  Place = "backup"
	Witness Place = "witness"
)

// Move gives a part in a VM to another host, which has none yet; whoever has it now leaves the group. It may be said again after any failure. Unless unprotected is
// allowed meanwhile, it is refused while the second copy is alive and complete. When it returns the new host was told; its copy is not complete yet.
func (client *Client) Move(ctx context.Context, vm string, place Place, to string, unprotected bool) error {
	return client.order(ctx, map[string]any{"do": "move", "vm": vm, string(place): to, "unprotected_meanwhile": unprotected})
}

// Standby has another host be the VM's standby, one without a part, or none if it is empty. When it returns the group has agreed to that.
func (client *Client) Standby(ctx context.Context, vm, host string) error {
	if host == "" {
		return client.order(ctx, map[string]any{"do": "move", "vm": vm, "no_standby": true})
	}
	return client.order(ctx, map[string]any{"do": "move", "vm": vm, "standby": host})
}

// Says is its state for people: the word, and why.
func (vm VM) Says() string {
	if vm.Why == "" {
		return vm.State
	}
	return vm.State + ": " + vm.Why
}
