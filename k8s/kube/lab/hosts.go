package lab

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"dunlin.dev/log"
)

// Hosts are three daemons of Dunlin's with a shared log, on loopback.
type Hosts struct {
	// Names are theirs; Client talks to all of them.
	Names  []string
	Client *log.Client
	dir    string
	run    map[string]*Process
}

// LogName is the shared log's.
const LogName = "tripod"

// BeginHosts starts them, with the dunlin program that DUNLIN names.
func BeginHosts(t testing.TB) *Hosts {
	t.Helper()
	dunlin := os.Getenv("DUNLIN")
	if dunlin == "" {
		t.Fatal("DUNLIN has to name the dunlin program: 'cargo xtask k8s test' does")
	}
	hosts := &Hosts{Names: []string{"a", "b", "c"}, dir: filepath.Join(t.TempDir(), "c"), run: map[string]*Process{}}
	arguments := []string{"init", hosts.dir, "--cluster", "tripod", "--control", "control.sock"}
	for _, name := range hosts.Names {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		// Kept until all have one, so that no two are the same.
		defer listener.Close()
		arguments = append(arguments, "--host", name+"="+listener.Addr().String())
	}
	if out, err := exec.Command(dunlin, arguments...).CombinedOutput(); err != nil {
		t.Fatalf("dunlin init: %v: %s", err, out)
	}
	return hosts
}

// Start starts the daemons and makes the log.
func (hosts *Hosts) Start(t testing.TB) {
	t.Helper()
	for _, name := range hosts.Names {
		process, err := Start(t, nil, os.Getenv("DUNLIN"), "host", filepath.Join(hosts.dir, name, "host.toml"))
		if err != nil {
			t.Fatal(err)
		}
		hosts.run[name] = process
		process.Until(t, "ready:")
	}
	hosts.Client = log.New(hosts.Sockets("a")...)
	ctx, end := context.WithTimeout(context.Background(), Patience)
	defer end()
	if err := hosts.Client.Create(ctx, LogName, hosts.Names...); err != nil {
		t.Fatal(fmt.Errorf("log: %w", err))
	}
}

// Sockets are the daemons' control sockets, this host's first.
func (hosts *Hosts) Sockets(first string) []string {
	sockets := []string{filepath.Join(hosts.dir, first, "control.sock")}
	for _, name := range hosts.Names {
		if name != first {
			sockets = append(sockets, filepath.Join(hosts.dir, name, "control.sock"))
		}
	}
	return sockets
}
