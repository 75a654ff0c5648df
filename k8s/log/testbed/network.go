package testbed

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// prefix begins the name of every namespace that is made here, and this process' number follows.
const prefix = "dunlin-go-"

// network is a switch and hosts, each a network namespace. A host has a bridge br0, which carries its address; its cable goes to the switch.
type network struct{ names []string }

func newNetwork(t testing.TB, names []string) *network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("network namespaces are made by root: run the test with sudo")
	}
	sweep(t)
	network := &network{names}
	t.Cleanup(func() {
		for _, name := range append([]string{"switch"}, names...) {
			// One that was never made has nothing to be removed.
			_ = exec.Command("ip", "netns", "delete", namespace(name)).Run()
		}
	})
	ip(t, "", "netns", "add", namespace("switch"))
	ip(t, "link add br0 type bridge mcast_snooping 0\nlink set br0 up\n", "-n", namespace("switch"), "-batch", "-")
	for at, name := range names {
		ip(t, "", "netns", "add", namespace(name))
		cable := "link add name %[1]s type veth peer name up0 netns %[2]s\nlink set dev %[1]s master br0\nlink set dev %[1]s up\n"
		ip(t, fmt.Sprintf(cable, "to-"+name, namespace(name)), "-n", namespace("switch"), "-batch", "-")
		// With an address of its own, a bridge does not change it for a new port's.
		inside := "link set lo up\nlink add br0 address 02:d0:00:01:01:%02x type bridge mcast_snooping 0\nlink set up0 master br0\n" +
			"link set br0 up\nlink set up0 up\naddr add %s/16 dev br0\n"
		ip(t, fmt.Sprintf(inside, at+1, network.address(at)), "-n", namespace(name), "-batch", "-")
	}
	return network
}

func namespace(name string) string { return fmt.Sprintf("%s%d-%s", prefix, os.Getpid(), name) }

// address is a host's, by its place in the list.
func (network *network) address(at int) string { return fmt.Sprintf("10.77.1.%d", at+1) }

// inside is a command that runs on a host; nsenter becomes that program. 'ip netns exec' would mount /sys anew, in which there are no control groups.
func (network *network) inside(name string, command []string) []string {
	return append([]string{"nsenter", "--net=/run/netns/" + namespace(name), "--"}, command...)
}

func ip(t testing.TB, input string, arguments ...string) {
	t.Helper()
	command := exec.Command("ip", arguments...)
	command.Stdin = strings.NewReader(input)
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", strings.Join(arguments, " "), err, out)
	}
}

// sweep removes what test programs that were killed have left.
func sweep(t testing.TB) {
	t.Helper()
	left, err := filepath.Glob("/run/netns/" + prefix + "*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range left {
		name := filepath.Base(path)
		number, _, _ := strings.Cut(strings.TrimPrefix(name, prefix), "-")
		if _, err := os.Stat("/proc/" + number); !os.IsNotExist(err) {
			continue
		}
		if _, err := strconv.Atoi(number); err == nil {
			ip(t, "", "netns", "delete", name)
		}
	}
}

// Interfaces are those in a host's network; it is for hosts that are [Apart].
func (hosts *Hosts) Interfaces(t testing.TB, name string) []string {
	t.Helper()
	out, err := exec.Command("ip", "-n", namespace(name), "-o", "link", "show").Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if parts := strings.SplitN(line, ": ", 3); len(parts) == 3 {
			name, _, _ := strings.Cut(parts[1], "@")
			all = append(all, name)
		}
	}
	return all
}

// Address is a host's in the network of all; it is for hosts that are [Apart].
func (hosts *Hosts) Address(name string) string {
	for at, other := range hosts.apart.names {
		if other == name {
			return hosts.apart.address(at)
		}
	}
	return ""
}

// Namespace is a host's network namespace, below /run/netns; it is for hosts that are [Apart].
func (hosts *Hosts) Namespace(name string) string { return namespace(name) }

// Client gives the switch an address in the network of all, and returns the namespace from which somebody reaches whatever runs on any host.
func (hosts *Hosts) Client(t testing.TB) string {
	t.Helper()
	ip(t, "", "-n", namespace("switch"), "address", "add", "10.77.9.1/16", "dev", "br0")
	return namespace("switch")
}

// Command is one that runs on a host; it is for hosts that are [Apart].
func (hosts *Hosts) Command(name string, command ...string) *exec.Cmd {
	inside := hosts.apart.inside(name, command)
	return exec.Command(inside[0], inside[1:]...)
}
