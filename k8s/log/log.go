// Package log is a client of Dunlin's shared logs (docs/log-service.md): it makes a log, proposes entries, and reads what is agreed.
//
// It talks to the daemon of its own host over the control socket; with the sockets of several daemons it goes on with another one
// when one dies. A [Writer]'s proposals count once each, and in the order in which they were made, whoever dies meanwhile.
//
// Not here: authentication. The control socket belongs to root, and whoever may open it may do everything.
package log

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"

	"dunlin.dev/log/lines"
)

// MostEntryBytes is the size of the largest entry.
const MostEntryBytes = 256 << 10

// MostNameBytes is the length of the longest proposer's name.
const MostNameBytes = 64

// Socket is where a daemon listens if its file does not say otherwise.
const Socket = lines.Socket

// ErrCompacted says that what was to be read is not kept any more. Its text names the oldest index.
var ErrCompacted = errors.New("compacted")

// Refused is a daemon's word that it did not do what it was asked for, in one line that says what to do.
type Refused = lines.Refused

// Client asks the daemons at its sockets.
type Client struct {
	sockets []string
	next    atomic.Uint32
}

// New returns a client of the daemons at these sockets; with none, of the one at [Socket].
func New(sockets ...string) *Client {
	if len(sockets) == 0 {
		sockets = []string{Socket}
	}
	return &Client{sockets: sockets}
}

// Entry is an agreed entry.
type Entry struct {
	// Index rises from entry to entry, with gaps.
	Index uint64 `json:"index"`
	// Term is the reign of the leader that proposed it.
	Term uint64 `json:"term"`
	// By and Number are of the proposer, if it gave itself a name.
	By     string `json:"by"`
	Number uint64 `json:"number"`
	Data   []byte `json:"data"`
}

// Status is how a log is, as one host sees it.
type Status struct {
	Name string `json:"name"`
	// State is "leads", "follows", "no-leader", "disk-full" or "failed".
	State string `json:"state"`
	// Why is the reason for it, where there is one.
	Why string `json:"why"`
	// Leader is the leading host, or empty.
	Leader string `json:"leader"`
	Term   uint64 `json:"term"`
	// First and Last are the indices that can be read there.
	First   uint64 `json:"first"`
	Last    uint64 `json:"last"`
	Entries uint64 `json:"entries"`
	Bytes   uint64 `json:"bytes"`
	Hosts   []struct {
		Host      string `json:"host"`
		Connected bool   `json:"connected"`
	} `json:"hosts"`
}

// answer is any line of a daemon.
type answer struct {
	Answer string `json:"answer"`
	Said   string `json:"said"`
	Why    string `json:"why"`
	Number uint64 `json:"number"`
	Index  uint64 `json:"index"`
	First  uint64 `json:"first"`
	Again  bool   `json:"again"`
	line   []byte
}

// conversation is a connection on which one request was made.
type conversation struct{ *lines.Conversation }

// ask begins a conversation with the next daemon that listens.
func (client *Client) ask(ctx context.Context, request map[string]any) (*conversation, error) {
	var problem error
	for range client.sockets {
		at := client.next.Load()
		socket := client.sockets[int(at)%len(client.sockets)]
		talk, err := lines.Dial(ctx, socket)
		if err == nil {
			request["do"] = "log"
			if err = talk.Say(request); err == nil {
				return &conversation{talk}, nil
			}
			talk.Close()
		}
		problem = err
		client.next.CompareAndSwap(at, at+1)
	}
	return nil, fmt.Errorf("no daemon answers: %w", problem)
}

// another says that the daemon that is asked now is of no use.
func (client *Client) another() { client.next.Add(1) }

// hear returns the next line that says something.
func (talk *conversation) hear() (answer, error) {
	for {
		line, err := talk.Hear()
		if err != nil {
			return answer{}, err
		}
		if line.Kind == "alive" {
			continue
		}
		var said answer
		if err := json.Unmarshal(line.Line, &said); err != nil {
			return answer{}, fmt.Errorf("the daemon's answer cannot be understood: %w", err)
		}
		said.line = line.Line
		return said, nil
	}
}

func (client *Client) do(ctx context.Context, request map[string]any, each func(answer) error) error {
	talk, err := client.ask(ctx, request)
	if err != nil {
		return err
	}
	defer talk.Close()
	defer talk.Until(ctx)()
	for {
		said, err := talk.hear()
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}
		if said.Answer == "done" {
			return nil
		}
		if err := each(said); err != nil {
			return err
		}
	}
}

// Create makes a log on these hosts of the cluster, all of which have to answer.
func (client *Client) Create(ctx context.Context, log string, hosts ...string) error {
	request := map[string]any{"ask": "create", "log": log, "hosts": hosts}
	return client.do(ctx, request, func(answer) error { return nil })
}

// Remove takes a log away from all its hosts.
func (client *Client) Remove(ctx context.Context, log string) error {
	request := map[string]any{"ask": "remove", "log": log}
	return client.do(ctx, request, func(answer) error { return nil })
}

// Status tells how a log is.
func (client *Client) Status(ctx context.Context, log string) (Status, error) {
	var status Status
	request := map[string]any{"ask": "status", "log": log}
	err := client.do(ctx, request, func(said answer) error { return json.Unmarshal(said.line, &status) })
	return status, err
}

// Read gives each agreed entry from an index on to each, until there is no more or, with follow, until the context ends or each
// returns an error. From 0 on it begins with the oldest entry that is kept. The error is [ErrCompacted] for what is not kept.
func (client *Client) Read(ctx context.Context, log string, from uint64, follow bool, each func(Entry) error) error {
	request := map[string]any{"ask": "read", "log": log, "from": from, "follow": follow}
	return client.do(ctx, request, func(said answer) error {
		switch said.Said {
		case "entry":
			var entry Entry
			if err := json.Unmarshal(said.line, &entry); err != nil {
				return err
			}
			return each(entry)
		case "compacted":
			return fmt.Errorf("%w: the oldest entry on that host is %d", ErrCompacted, said.First)
		}
		return nil
	})
}
