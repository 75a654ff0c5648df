package log

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// pause is between two tries to find a leader.
const pause = 50 * time.Millisecond

// ErrClosed says that the writer was closed.
var ErrClosed = errors.New("the writer is closed")

// Writer proposes entries to one log. Many goroutines may use it at once.
//
// What is under way when a daemon or a host dies is said again, with the same number: each proposal is in the log once.
type Writer struct {
	client *Client
	log    string
	by     string
	end    context.CancelFunc
	done   chan struct{}

	mutex   sync.Mutex
	next    uint64
	waiting []*proposal
	failed  error
	more    chan struct{}
}

// proposal waits in the order of its number.
type proposal struct {
	number uint64
	data   []byte
	result chan result
}

type result struct {
	index uint64
	err   error
}

// NewWriter returns a writer. A proposer's name is used by one writer at a time; next is the number of its first proposal: 1 for a new
// name, else one more than the last that was made under it.
func (client *Client) NewWriter(log, by string, next uint64) *Writer {
	ctx, end := context.WithCancel(context.Background())
	writer := &Writer{
		client: client, log: log, by: by, next: next,
		end: end, done: make(chan struct{}), more: make(chan struct{}, 1),
	}
	go writer.run(ctx)
	return writer
}

// Propose returns the index of the entry once it is on the disks of a majority (0 if that was so long ago that the index is not
// known). If the context ends before, the entry may be agreed all the same.
func (writer *Writer) Propose(ctx context.Context, data []byte) (uint64, error) {
	if len(data) > MostEntryBytes {
		return 0, fmt.Errorf("an entry has at most %d bytes, this one has %d", MostEntryBytes, len(data))
	}
	writer.mutex.Lock()
	if writer.failed != nil {
		writer.mutex.Unlock()
		return 0, writer.failed
	}
	mine := &proposal{writer.next, data, make(chan result, 1)}
	writer.next++
	writer.waiting = append(writer.waiting, mine)
	writer.mutex.Unlock()
	writer.ring()
	select {
	case result := <-mine.result:
		return result.index, result.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// Close ends the writer; what is under way fails with [ErrClosed], and may be agreed all the same.
func (writer *Writer) Close() {
	writer.fail(ErrClosed)
	writer.end()
	<-writer.done
}

func (writer *Writer) ring() {
	select {
	case writer.more <- struct{}{}:
	default:
	}
}

func (writer *Writer) fail(err error) {
	writer.mutex.Lock()
	defer writer.mutex.Unlock()
	if writer.failed == nil {
		writer.failed = err
	}
	for _, waiting := range writer.waiting {
		waiting.result <- result{err: writer.failed}
	}
	writer.waiting = nil
}

func (writer *Writer) run(ctx context.Context) {
	defer close(writer.done)
	for ctx.Err() == nil {
		err := writer.converse(ctx)
		var refused *Refused
		if errors.As(err, &refused) && refused.Code == 2 {
			writer.fail(err)
			return
		}
		writer.client.another()
		select {
		case <-ctx.Done():
		case <-time.After(pause): // nothing tells when somebody leads
		}
	}
}

// converse says everything that waits, and then what comes, to one daemon until it refuses or is gone.
func (writer *Writer) converse(ctx context.Context) error {
	talk, err := writer.client.ask(ctx, map[string]any{"ask": "write", "log": writer.log, "by": writer.by})
	if err != nil {
		return err
	}
	defer talk.Close()
	defer talk.Until(ctx)()
	if said, err := talk.hear(); err != nil || said.Said != "open" {
		return err
	}
	heard := make(chan error, 1)
	go func() { heard <- writer.listen(talk) }()
	var told uint64
	for {
		for {
			line := writer.after(told)
			if line == nil {
				break
			}
			told = line.number
			if err := talk.Say(map[string]any{"number": line.number, "data": line.data}); err != nil {
				talk.Close()
				<-heard
				return err
			}
		}
		select {
		case err := <-heard:
			return err
		case <-writer.more:
		}
	}
}

// after returns what waits with the lowest number above told.
func (writer *Writer) after(told uint64) *proposal {
	writer.mutex.Lock()
	defer writer.mutex.Unlock()
	if len(writer.waiting) == 0 {
		return nil
	}
	at := uint64(0)
	if first := writer.waiting[0].number; told >= first {
		at = told + 1 - first
	}
	if at >= uint64(len(writer.waiting)) {
		return nil
	}
	return writer.waiting[at]
}

// listen hears what becomes of the proposals.
func (writer *Writer) listen(talk *conversation) error {
	for {
		said, err := talk.hear()
		if err != nil {
			return err
		}
		switch said.Said {
		case "agreed":
			writer.agreed(said.Number, said.Index)
		case "refused":
			if said.Again {
				return errors.New(said.Why)
			}
			return &Refused{Why: said.Why, Code: 2}
		}
	}
}

// agreed answers whoever waits for that number. Answers come in the order of the numbers.
func (writer *Writer) agreed(number, index uint64) {
	writer.mutex.Lock()
	defer writer.mutex.Unlock()
	for len(writer.waiting) > 0 && writer.waiting[0].number <= number {
		first := writer.waiting[0]
		writer.waiting = writer.waiting[1:]
		answered := result{}
		if first.number == number {
			answered.index = index
		}
		first.result <- answered
	}
}
