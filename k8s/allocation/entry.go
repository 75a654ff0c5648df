package allocation

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Version is that of the entries. A controller that reads a later one has to stop: it would know less than the others. 2: what applications have beside. 3: tasks that
// get another R. 4: zones in which a task's nodes are, where not every node can run it. 5: copies that are there again with their nodes.
const Version = 5

// Entry is what controllers agree on: a value in the shared log. Each of its changes is judged by itself.
type Entry struct {
	Version int `json:"version"`
	// By is the controller that proposes it. With no change it says only that this controller is alive.
	By string `json:"by"`
	// Life and Number tell its entries apart: a controller that begins again has another life.
	Life   uint64 `json:"life"`
	Number uint64 `json:"number"`
	// Office is the index of the entry by which the proposer leads; 0 if it decides nothing.
	Office     uint64      `json:"office,omitempty"`
	Changes    []Change    `json:"changes,omitempty"`
	Checkpoint *Checkpoint `json:"checkpoint,omitempty"`
}

// Change is one of these. Decisions are the leading controller's, facts are anybody's.
type Change struct {
	// Lead takes the office, if its number is still the named one.
	Lead *uint64 `json:"lead,omitempty"`

	// Decisions.
	SetNode         *Node        `json:"setNode,omitempty"`
	DropNode        string       `json:"dropNode,omitempty"`
	SetApplication  *Application `json:"setApplication,omitempty"`
	DropApplication string       `json:"dropApplication,omitempty"`
	DropController  string       `json:"dropController,omitempty"`
	Assign          *Assignment  `json:"assign,omitempty"`
	Move            *Move        `json:"move,omitempty"`
	Return          *Return      `json:"return,omitempty"`
	Reassign        *Reassign    `json:"reassign,omitempty"`
	Resize          *Resize      `json:"resize,omitempty"`
	End             string       `json:"end,omitempty"`

	// Facts.
	Placed  *Placed `json:"placed,omitempty"`
	Bound   *Word   `json:"bound,omitempty"`
	Refused *Word   `json:"refused,omitempty"`
	Gone    *Word   `json:"gone,omitempty"`
}

// MovesCopies says whether a change may be of where copies are, or of who leads: after it a look of before may lack something.
func (change Change) MovesCopies() bool {
	return change.SetNode == nil && change.SetApplication == nil && change.DropApplication == ""
}

// Node is what a node reports (S1).
type Node struct {
	Name string `json:"name"`
	// Zone may be empty: then the node is a zone of its own.
	Zone     string    `json:"zone,omitempty"`
	Capacity Resources `json:"capacity"`
}

// Application shares a quota among its tasks.
type Application struct {
	Name  string    `json:"name"`
	Quota Resources `json:"quota"`
	// MostStrength is the largest R that a task of it may have: what its offers are divided by (S2).
	MostStrength int `json:"mostStrength"`
	// Beside is what its tasks with R = 1 have that the cluster places by itself, without a controller: the sum of them.
	Beside Resources `json:"beside"`
}

// Task is what an application submits (S3). A name is one task's at a time: when none of its copies is there any more, it may be another one's.
type Task struct {
	Name        string `json:"name"`
	Application string `json:"application"`
	// Strength is R: so many copies, on different nodes.
	Strength int `json:"strength"`
	// Demand is what one copy needs.
	Demand Resources `json:"demand"`
}

// Place says where a copy runs, and which controller binds it there.
type Place struct {
	Node       string `json:"node"`
	Controller string `json:"controller"`
}

// Assignment is a task with a place for each of its copies (S4): all of them or none.
type Assignment struct {
	Task
	Places []Place `json:"places"`
	// Zones are how many there are with a node large enough that can run it, one without a zone counted as one; 0 is what the state says, where every node can.
	Zones int `json:"zones,omitempty"`
}

// Move gives a copy that has no place a new one.
type Move struct {
	Task string `json:"task"`
	Copy int    `json:"copy"`
	Place
}

// Return gives a copy that has no place its last one back, with the ticket of then: its node was gone, and is there again with the copy, which has no other place yet.
type Return struct {
	Task string `json:"task"`
	Copy int    `json:"copy"`
	Place
	Ticket uint64 `json:"ticket"`
}

// Reassign gives a copy to another controller; its place stays.
type Reassign struct {
	Task       string `json:"task"`
	Copy       int    `json:"copy"`
	Controller string `json:"controller"`
}

// Resize gives a task with R > 1 another R > 1 while it is placed. What comes on top has no place yet, as a copy that is lost; what goes has none any more.
type Resize struct {
	Task     string `json:"task"`
	Strength int    `json:"strength"`
}

// Placed tells of a task with R = 1 that was bound at once, without agreement.
type Placed struct {
	Task
	Place
	Ticket uint64 `json:"ticket"`
}

// Word is what became of a copy at its place.
type Word struct {
	Task   string `json:"task"`
	Copy   int    `json:"copy"`
	Ticket uint64 `json:"ticket"`
}

// Checkpoint is a part of the whole state as of an entry. It changes nothing; a controller that comes when older entries are no longer
// kept begins with it.
type Checkpoint struct {
	At    uint64 `json:"at"`
	Part  int    `json:"part"`
	Parts int    `json:"parts"`
	Data  []byte `json:"data"`
}

// Encode returns the entry's bytes.
func (entry Entry) Encode() []byte {
	entry.Version = Version
	data, err := json.Marshal(entry)
	if err != nil {
		panic(err) // plain data: a programmer's error
	}
	return data
}

// ErrLater says that another controller is of a later version.
type ErrLater struct{ Version int }

func (later ErrLater) Error() string {
	return fmt.Sprintf("an entry of version %d: this controller knows up to %d; run all controllers with the newest version", later.Version, Version)
}

// Decode returns the entry, [ErrLater], or why it is none: then it is left out, by all controllers alike.
func Decode(data []byte) (Entry, error) {
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return Entry{}, fmt.Errorf("no entry: %w", err)
	}
	if version.Version > Version {
		return Entry{}, ErrLater{version.Version}
	}
	var entry Entry
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&entry); err != nil {
		return Entry{}, fmt.Errorf("no entry: %w", err)
	}
	if version.Version < 1 || entry.By == "" {
		return Entry{}, fmt.Errorf("no entry: of version %d, by '%s'", version.Version, entry.By)
	}
	return entry, nil
}
