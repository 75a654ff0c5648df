package testbed

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
)

// Hosts are three daemons of Dunlin's, or more.
type Hosts struct {
	// Names are theirs.
	Names []string
	dir   string
	run   map[string]*Process
	apart *network
}

var names = []string{"a", "b", "c"}

// OnLoopback makes their files; the daemons share this machine's network. None is started.
func OnLoopback(t testing.TB) *Hosts {
	t.Helper()
	addresses, err := FreeAddresses(len(names))
	if err != nil {
		t.Fatal(err)
	}
	hosts := newHosts(t, nil, names, addresses)
	for _, name := range names {
		hosts.patient(t, name)
	}
	return hosts
}

// patient gives a host's groups longer elections: where one machine plays all hosts and the clients, with the race detector, a daemon that has no turn for 60 ms is an everyday thing, and no
// death.
func (hosts *Hosts) patient(t testing.TB, name string) {
	t.Helper()
	path := filepath.Join(hosts.Folder(name), "cluster.toml")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	longer := election.ReplaceAll(text, []byte("election_ms = 300"))
	if bytes.Equal(text, longer) {
		t.Fatalf("%s has no election_ms", path)
	}
	if err := os.WriteFile(path, longer, 0o600); err != nil {
		t.Fatal(err)
	}
}

var election = regexp.MustCompile(`(?m)^election_ms = \d+$`)

// Ports above those that services are known by, and below those that Linux gives to connections.
const first, end, tries = 10_000, 32_000, 100

// tried is how many ports this process has tried to listen at.
var tried atomic.Uint32

// held keeps the other test programs out of this one's window.
var held net.Listener

// window is the first of a hundred ports that this process has to itself. It takes one after the other: whoever is told of a free port need not listen there
// yet when the next one asks. A socket of a name that ends with the process says whose they are.
var window = sync.OnceValue(func() int {
	const windows = (end - first) / tries
	at := os.Getpid() % windows
	for number := 0; number < windows; number++ {
		mine := (at + number) % windows
		listener, err := net.Listen("unix", fmt.Sprintf("@dunlin-test-ports-%d", mine))
		if err == nil {
			held, at = listener, mine
			break
		}
	}
	return first + at*tries
})

// FreeAddresses are those of this machine, all different, at which nobody listens now, for processes that are to listen there. They are not of the ports
// that the kernel chooses: any connection of this machine might have such a port before the process does.
func FreeAddresses(count int) ([]string, error) {
	var free []string
	for try := 0; try < tries && len(free) < count; try++ {
		listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", window()+int(tried.Add(1)%tries)))
		if err != nil {
			continue
		}
		// Kept until all are found, so that no two are the same.
		defer listener.Close()
		free = append(free, listener.Addr().String())
	}
	if len(free) < count {
		return nil, fmt.Errorf("%d of %d ports that were tried are free, and %d are needed: see who listens with 'ss -ltn'", len(free), tries, count)
	}
	return free, nil
}

// Apart makes their files; each daemon has a network of its own, with a bridge br0 that a VM's cards join. Beside the three there are as many as are named.
// It needs root. None is started.
func Apart(t testing.TB, more ...string) *Hosts {
	t.Helper()
	names := append(append([]string(nil), names...), more...)
	apart := newNetwork(t, names)
	var addresses []string
	for at := range names {
		addresses = append(addresses, apart.address(at)+":7700")
	}
	return newHosts(t, apart, names, addresses)
}

func newHosts(t testing.TB, apart *network, names, addresses []string) *Hosts {
	t.Helper()
	// A control socket's path is short, whatever a test is called.
	dir, err := os.MkdirTemp("", "dunlin-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	hosts := &Hosts{Names: names, dir: filepath.Join(dir, "c"), run: map[string]*Process{}, apart: apart}
	arguments := []string{"init", hosts.dir, "--cluster", "testbed", "--control", "control.sock"}
	for at, name := range names {
		arguments = append(arguments, "--host", name+"="+addresses[at])
	}
	if out, err := exec.Command(program(t), arguments...).CombinedOutput(); err != nil {
		t.Fatalf("dunlin init: %v: %s", err, out)
	}
	return hosts
}

// program is dunlin, which DUNLIN names.
func program(t testing.TB) string {
	t.Helper()
	dunlin := os.Getenv("DUNLIN")
	if dunlin == "" {
		t.Fatal("DUNLIN has to name the dunlin program: DUNLIN=$PWD/target/debug/dunlin go test ./... in the module's folder")
	}
	return dunlin
}

// Start starts the daemons of these hosts, or of all, and waits until they are ready.
func (hosts *Hosts) Start(t testing.TB, names ...string) {
	t.Helper()
	if len(names) == 0 {
		names = hosts.Names
	}
	for _, name := range names {
		command := []string{program(t), "host", filepath.Join(hosts.Folder(name), "host.toml")}
		if hosts.apart != nil {
			command = hosts.apart.inside(name, command)
		}
		process, err := Start(t, nil, command[0], command[1:]...)
		if err != nil {
			t.Fatal(err)
		}
		hosts.run[name] = process
		process.Until(t, "ready:")
	}
}

// Process is the daemon of a host that was started.
func (hosts *Hosts) Process(name string) *Process { return hosts.run[name] }

// Kill is SIGKILL to a host's daemon; its copies of VMs end with it.
func (hosts *Hosts) Kill(name string) { hosts.run[name].Kill() }

// Folder has a host's files, and below them its state.
func (hosts *Hosts) Folder(name string) string { return filepath.Join(hosts.dir, name) }

// Socket is a daemon's control socket.
func (hosts *Hosts) Socket(name string) string {
	return filepath.Join(hosts.Folder(name), "control.sock")
}

// Sockets are all of them, this host's first.
func (hosts *Hosts) Sockets(first string) []string {
	sockets := []string{hosts.Socket(first)}
	for _, name := range hosts.Names {
		if name != first {
			sockets = append(sockets, hosts.Socket(name))
		}
	}
	return sockets
}
