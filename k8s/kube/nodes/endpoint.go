package nodes

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// InNamespace does something in a network namespace, on one thread: what it opens there stays of that network. The thread goes back to its own network and is not
// ended: programs that it had started before would be told that their parent is dead.
func InNamespace(namespace string, do func() error) (err error) {
	runtime.LockOSThread()
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer own.Close()
	other, err := os.Open("/run/netns/" + namespace)
	if err != nil {
		return err
	}
	defer other.Close()
	if err := unix.Setns(int(other.Fd()), unix.CLONE_NEWNET); err != nil {
		return err
	}
	defer func() {
		back := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET)
		if back == nil {
			// A thread that is somewhere else stays locked, so that nothing else ever runs on it.
			runtime.UnlockOSThread()
		}
		err = errors.Join(err, back)
	}()
	return do()
}

// forward has an address of this machine's reached from a host's own loopback, until the test ends.
func forward(t testing.TB, namespace, to string) string {
	t.Helper()
	var listener net.Listener
	err := InNamespace(namespace, func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			go join(from, to)
		}
	}()
	return listener.Addr().String()
}

// join ends both when either has nothing more to say.
func join(from net.Conn, to string) {
	defer from.Close()
	other, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer other.Close()
	done := make(chan struct{}, 2)
	for _, pair := range [][2]net.Conn{{from, other}, {other, from}} {
		go func() {
			_, _ = io.Copy(pair[0], pair[1]) // that it ended is what counts
			done <- struct{}{}
		}()
	}
	<-done
}
