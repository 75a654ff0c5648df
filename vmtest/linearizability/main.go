// Linearizability says whether a history of reads and writes of registers can have happened one after the other.
//
// Decides: nothing by itself; porcupine does, over a model of a register for each key.
// Flow: a file of JSON lines, one operation each -> porcupine -> a line and an exit code: 0 it can, 1 it cannot, 2 bad input or
// too much work.
// Not here: who made the history (vmtest/src/client/registers.rs).
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

// The most time that a check may take.
const patience = 5 * time.Minute

type operation struct {
	Client   int     `json:"client"`
	Kind     string  `json:"kind"`
	Key      string  `json:"key"`
	Wrote    *string `json:"wrote"`
	Read     *string `json:"read"`
	CallNS   int64   `json:"call_ns"`
	ReturnNS *int64  `json:"return_ns"`
}

// A register that was never written is not one that holds an empty text.
type value struct {
	there bool
	text  string
}

func of(text *string) value {
	if text == nil {
		return value{}
	}
	return value{true, *text}
}

var register = porcupine.Model{
	Init: func() interface{} { return value{} },
	Step: func(state, input, _ interface{}) (bool, interface{}) {
		now, op := state.(value), input.(operation)
		reads := op.Kind != "set" && op.ReturnNS != nil
		if reads && of(op.Read) != now {
			return false, now
		}
		if op.Wrote != nil {
			return true, of(op.Wrote)
		}
		return true, now
	},
}

func read(from io.Reader) (map[string][]porcupine.Operation, int, error) {
	keys, count := map[string][]porcupine.Operation{}, 0
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var op operation
		if err := json.Unmarshal(lines.Bytes(), &op); err != nil {
			return nil, 0, fmt.Errorf("line %d: %w", count+1, err)
		}
		if (op.Kind == "get") != (op.Wrote == nil) {
			return nil, 0, fmt.Errorf("line %d: a %s that wrote, or did not", count+1, op.Kind)
		}
		count++
		// Without an answer it may have happened at any time since.
		end := int64(math.MaxInt64)
		if op.ReturnNS != nil {
			end = *op.ReturnNS
		} else if op.Kind == "get" {
			continue
		}
		keys[op.Key] = append(keys[op.Key], porcupine.Operation{
			ClientId: op.Client, Input: op, Call: op.CallNS, Output: nil, Return: end,
		})
	}
	if count == 0 && lines.Err() == nil {
		return nil, 0, errors.New("no operation")
	}
	return keys, count, lines.Err()
}

// No time at all would mean as much as it takes.
func left(deadline time.Time) time.Duration {
	if left := time.Until(deadline); left > time.Millisecond {
		return left
	}
	return time.Millisecond
}

func run() (int, error) {
	if len(os.Args) != 2 {
		return 2, errors.New("usage: linearizability FILE")
	}
	file, err := os.Open(os.Args[1])
	if err != nil {
		return 2, err
	}
	defer file.Close()
	keys, count, err := read(file)
	if err != nil {
		return 2, fmt.Errorf("%s: %w", os.Args[1], err)
	}
	names := make([]string, 0, len(keys))
	for name := range keys {
		names = append(names, name)
	}
	sort.Strings(names)
	deadline := time.Now().Add(patience)
	for _, name := range names {
		switch porcupine.CheckOperationsTimeout(register, keys[name], left(deadline)) {
		case porcupine.Illegal:
			return 1, fmt.Errorf("the history of %s, %d operations, cannot have happened", name, len(keys[name]))
		case porcupine.Unknown:
			return 2, fmt.Errorf("the history of %s, %d operations, is too much work", name, len(keys[name]))
		}
	}
	fmt.Printf("%d operations on %d registers are linearizable\n", count, len(names))
	return 0, nil
}

func main() {
	code, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "linearizability:", err)
	}
	os.Exit(code)
}
