package nodes_test

import (
	"bufio"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"dunlin.dev/k8s/kube/nodes"
	"dunlin.dev/log/testbed"
)

// clients count in redis, each with a number of its own on a connection of its own, which no host's death may break.
type clients struct {
	mutex   sync.Mutex
	news    chan struct{}
	answers int
	lost    int
	gap     time.Duration
	broken  error
	stop    chan struct{}
	all     sync.WaitGroup
}

// count begins so many, from a network namespace.
func count(t *testing.T, namespace, address string, number int) *clients {
	t.Helper()
	clients := &clients{news: make(chan struct{}), stop: make(chan struct{})}
	for at := range number {
		var conn net.Conn
		// A VM may be protected before its guest has started redis.
		testbed.Until(t, "redis listens", func() error {
			return nodes.InNamespace(namespace, func() (err error) {
				conn, err = net.DialTimeout("tcp", address, 10*time.Second)
				return err
			})
		})
		clients.all.Add(1)
		go func() {
			defer clients.all.Done()
			defer conn.Close()
			if err := clients.run(conn, fmt.Sprintf("client-%d", at)); err != nil {
				clients.tell(func() { clients.broken = err })
			}
		}()
	}
	return clients
}

func (clients *clients) run(conn net.Conn, name string) error {
	reader := bufio.NewReader(conn)
	for served := 1; ; served++ {
		select {
		case <-clients.stop:
			return nil
		default:
		}
		begun := time.Now()
		if err := conn.SetDeadline(begun.Add(testbed.Patience)); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(conn, "INCR %s\r\n", name); err != nil {
			return err
		}
		line, err := reader.ReadString('\n')
		if err != nil {
			return err
		}
		says, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line, ":")))
		if err != nil {
			return fmt.Errorf("redis says %q: %w", line, err)
		}
		took := time.Since(begun)
		clients.tell(func() {
			clients.answers++
			clients.gap = max(clients.gap, took)
			if says != served {
				clients.lost++
			}
		})
		served = says
	}
}

func (clients *clients) tell(what func()) {
	clients.mutex.Lock()
	defer clients.mutex.Unlock()
	what()
	close(clients.news)
	clients.news = make(chan struct{})
}

// until waits for so many more answers.
func (clients *clients) until(t *testing.T, more int) {
	t.Helper()
	late := time.After(testbed.Patience)
	clients.mutex.Lock()
	want := clients.answers + more
	clients.mutex.Unlock()
	for {
		clients.mutex.Lock()
		answers, news, broken := clients.answers, clients.news, clients.broken
		clients.mutex.Unlock()
		if broken != nil {
			t.Fatalf("a connection broke: %v", broken)
		}
		if answers >= want {
			return
		}
		select {
		case <-news:
		case <-late:
			t.Fatalf("%d answers, and not %d", answers, want)
		}
	}
}

// end ends them, and says how many answers were not the next number, and the longest that anybody waited for one.
func (clients *clients) end(t *testing.T) (lost int, gap time.Duration) {
	t.Helper()
	close(clients.stop)
	clients.all.Wait()
	if clients.broken != nil {
		t.Fatalf("a connection broke: %v", clients.broken)
	}
	return clients.lost, clients.gap
}
