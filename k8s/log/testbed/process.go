// Package testbed runs programs for tests in Go: whatever is started ends with the test, and the longest that anything may take is written once.
//
// [Start] and [Build] are for any program; [Hosts] are three daemons of Dunlin's, on loopback or in network namespaces of their own.
// Not here: what a test asks of them.
package testbed

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// Patience is the longest that anything may take, on a machine however busy.
	Patience = 120 * time.Second
	// again is when something that nothing tells of is asked again.
	again = 100 * time.Millisecond
	// kept is how much of what a program says is kept.
	kept = 1 << 20
)

// Process is a program that runs until the test ends.
type Process struct {
	command *exec.Cmd
	Ended   chan struct{}
	mutex   sync.Mutex
	said    bytes.Buffer
	heard   chan struct{}
}

// Write takes what the program says.
func (process *Process) Write(data []byte) (int, error) {
	process.mutex.Lock()
	defer process.mutex.Unlock()
	if process.said.Len() < kept {
		process.said.Write(data)
	}
	close(process.heard)
	process.heard = make(chan struct{})
	return len(data), nil
}

// Said is what it said, the beginning of it.
func (process *Process) Said() string {
	process.mutex.Lock()
	defer process.mutex.Unlock()
	return process.said.String()
}

// Until waits until the program has said this.
func (process *Process) Until(t testing.TB, what string) {
	t.Helper()
	late := time.After(Patience)
	for {
		process.mutex.Lock()
		there, heard := bytes.Contains(process.said.Bytes(), []byte(what)), process.heard
		process.mutex.Unlock()
		if there {
			return
		}
		select {
		case <-heard:
		case <-process.Ended:
			t.Fatalf("it has ended, and never said '%s': %s", what, process.Said())
		case <-late:
			t.Fatalf("it does not say '%s': %s", what, process.Said())
		}
	}
}

// Start starts a program with further variables in its environment.
func Start(t testing.TB, environment []string, program string, arguments ...string) (*Process, error) {
	process := &Process{command: exec.Command(program, arguments...), Ended: make(chan struct{}), heard: make(chan struct{})}
	process.command.Stdout, process.command.Stderr = process, process
	process.command.Env = append(os.Environ(), environment...)
	// It does not outlive a test that is killed.
	process.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := process.command.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = process.command.Wait() // that it ended is what counts
		close(process.Ended)
	}()
	t.Cleanup(func() {
		process.Kill()
		// A program that is killed has no exit code that would tell of it.
		ours, others := races(process.Said())
		for _, race := range ours {
			t.Errorf("%s has a race: %s", filepath.Base(program), race)
		}
		for _, race := range others {
			t.Logf("%s has a race in which nothing of this tree has a part: %s", filepath.Base(program), race)
		}
		if t.Failed() && testing.Verbose() {
			t.Logf("%s said: %s", filepath.Base(program), process.Said())
		}
	})
	return process, nil
}

// main is what each stack of a program's first goroutine begins with.
var main = regexp.MustCompile(`(?m)^ *main\.main\(\)\n.*\n`)

// races are what the race detector has written: those in whose stacks is a function of this tree's, and those of the programs that it is built into, which are not
// this tree's to mend.
func races(said string) (ours, others []string) {
	for _, part := range strings.Split(said, "==================\n") {
		switch {
		case !strings.HasPrefix(part, "WARNING: DATA RACE"):
		case strings.Contains(main.ReplaceAllString(part, ""), "dunlin.dev/"):
			ours = append(ours, part)
		default:
			others = append(others, part)
		}
	}
	return ours, others
}

// Kill is SIGKILL; it returns when the program has ended.
func (process *Process) Kill() {
	_ = process.command.Process.Kill()
	<-process.Ended
}

// Signal sends one.
func (process *Process) Signal(t testing.TB, signal syscall.Signal) {
	if err := process.command.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

// Pid is its process.
func (process *Process) Pid() int { return process.command.Process.Pid }

// Until waits until something holds that is asked again and again, and fails with what it last said.
func Until(t testing.TB, what string, holds func() error) {
	t.Helper()
	late := time.Now().Add(Patience)
	for {
		err := holds()
		if err == nil {
			return
		}
		if time.Now().After(late) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(again)
	}
}

// built are the programs in Go that were built for this test program's tests.
var built struct {
	sync.Mutex
	dir   string
	paths map[string]string
}

// Build builds a command of this tree once, and returns its path. [Main] removes it.
func Build(t testing.TB, command string, flags ...string) string {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	if path := built.paths[command]; path != "" {
		return path
	}
	if built.dir == "" {
		dir, err := os.MkdirTemp("", "dunlin-built-")
		if err != nil {
			t.Fatal(err)
		}
		built.dir, built.paths = dir, map[string]string{}
	}
	path := filepath.Join(built.dir, filepath.Base(command))
	arguments := append(append([]string{"build", "-buildvcs=false"}, flags...), "-o", path, command)
	build := exec.Command("go", arguments...)
	if !detectsRaces(flags) {
		// As its image is built, whatever these tests are built with: all that it imports is compiled once.
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatal(fmt.Errorf("%w: %s", err, out))
	}
	built.paths[command] = path
	return path
}

// detectsRaces is whether a program is built with the race detector, which is in C.
func detectsRaces(flags []string) bool {
	for _, flag := range flags {
		if flag == "-race" {
			return true
		}
	}
	return false
}

// Main runs a package's tests, and removes what was built for them: it is what a TestMain does.
func Main(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		os.RemoveAll(built.dir)
	}
	os.Exit(code)
}
