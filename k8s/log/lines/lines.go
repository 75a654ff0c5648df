// Package lines is the conversation with a daemon: one JSON object a line, over its control socket.
//
// It decides nothing. Flow: [Dial], one request by [Conversation.Say], answers by [Conversation.Hear] until "done". A refusal is an error,
// [Refused]. A daemon that says nothing for 30 seconds counts as gone: whoever follows is told every five that it is alive.
//
// Not here: what is asked, and authentication. The control socket belongs to root, and whoever may open it may do everything.
package lines

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"time"
)

// Socket is where a daemon listens if its file does not say otherwise.
const Socket = "/run/dunlin/dunlin.sock"

// silent is how long a daemon may say nothing.
const silent = 30 * time.Second

// Refused is a daemon's word that it did not do what it was asked for, in one line that says what to do.
type Refused struct {
	Why string
	// Code is 2 for bad input, and 1 for what may go well another time.
	Code int
}

func (refused *Refused) Error() string { return refused.Why }

// Answer is a line of a daemon's.
type Answer struct {
	// Kind is what it is: "done" is the last one.
	Kind string
	// Line is all of it.
	Line []byte
}

// Conversation is a connection on which one request is made.
type Conversation struct {
	conn  net.Conn
	lines *bufio.Reader
	// patience is how long the daemon may say nothing; as long as it likes if it is 0.
	patience time.Duration
}

// Dial connects to the daemon at this socket.
func Dial(ctx context.Context, socket string) (*Conversation, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	return &Conversation{conn, bufio.NewReaderSize(conn, 64<<10), silent}, nil
}

// Patiently says that the daemon may take as long as it likes to answer: then the context is what ends the conversation.
func (talk *Conversation) Patiently() { talk.patience = 0 }

// Say says one line.
func (talk *Conversation) Say(value any) error {
	line, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if err = talk.conn.SetWriteDeadline(time.Now().Add(silent)); err != nil {
		return err
	}
	_, err = talk.conn.Write(append(line, '\n'))
	return err
}

// Hear returns the next line.
func (talk *Conversation) Hear() (Answer, error) {
	var until time.Time
	if talk.patience > 0 {
		until = time.Now().Add(talk.patience)
	}
	if err := talk.conn.SetReadDeadline(until); err != nil {
		return Answer{}, err
	}
	line, err := talk.lines.ReadBytes('\n')
	if err != nil {
		return Answer{}, fmt.Errorf("the daemon hung up: %w", err)
	}
	var said struct {
		Answer string `json:"answer"`
		Why    string `json:"why"`
		Code   int    `json:"code"`
	}
	if err := json.Unmarshal(line, &said); err != nil {
		return Answer{}, fmt.Errorf("the daemon's answer cannot be understood: %w", err)
	}
	if said.Answer == "failed" {
		return Answer{said.Answer, line}, &Refused{said.Why, said.Code}
	}
	return Answer{said.Answer, line}, nil
}

// Close ends it.
func (talk *Conversation) Close() { talk.conn.Close() }

// Until ends the conversation when the context does; the returned function ends that watch.
func (talk *Conversation) Until(ctx context.Context) func() {
	done := make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
			talk.Close()
		case <-done:
		}
	}()
	return func() { close(done) }
}
