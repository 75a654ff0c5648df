package log

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"dunlin.dev/log/testbed"
)

// patience is the longest that anything may take, on a machine however busy.
const patience = testbed.Patience

var hosts = []string{"a", "b", "c"}

// cluster is three real daemons on this machine, each with a folder and an address of its own.
type cluster struct {
	t *testing.T
	*testbed.Hosts
}

func newCluster(t *testing.T) *cluster { return &cluster{t, testbed.OnLoopback(t)} }

// start runs a host's daemon and waits until it is ready.
func (cluster *cluster) start(host string) { cluster.Start(cluster.t, host) }

// kill is SIGKILL.
func (cluster *cluster) kill(host string) { cluster.Kill(host) }

func (cluster *cluster) client(names ...string) *Client {
	var sockets []string
	for _, host := range names {
		sockets = append(sockets, cluster.Socket(host))
	}
	return New(sockets...)
}

// leader waits until a host leads that is not this one.
func (cluster *cluster) leader(ctx context.Context, client *Client, not string) (leader string) {
	cluster.t.Helper()
	testbed.Until(cluster.t, "one leads that is not host '"+not+"'", func() error {
		status, err := client.Status(ctx, "jobs")
		if leader = status.Leader; err != nil || leader == "" || leader == not {
			return fmt.Errorf("%+v, %v", status, err)
		}
		return nil
	})
	return leader
}

// read returns the first count entries of a host's log.
func (cluster *cluster) read(ctx context.Context, host string, count int) []Entry {
	var entries []Entry
	enough := errors.New("enough")
	err := cluster.client(host).Read(ctx, "jobs", 0, true, func(entry Entry) error {
		if entries = append(entries, entry); len(entries) == count {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) {
		cluster.t.Fatalf("host %s: %d entries of %d, then %v", host, len(entries), count, err)
	}
	return entries
}

func TestEachProposalIsThereOnceInOneOrderWhoeverIsKilled(t *testing.T) {
	cluster := newCluster(t)
	for _, host := range hosts {
		cluster.start(host)
	}
	ctx, end := context.WithTimeout(context.Background(), patience)
	defer end()
	client := cluster.client(hosts...)
	testbed.CreateLog(t, ctx, client, "jobs", hosts...)
	const proposers, each, half = 16, 40, 20
	var done, reached sync.WaitGroup
	writer := client.NewWriter("jobs", "test", 1)
	defer writer.Close()
	reached.Add(proposers)
	done.Add(proposers)
	var mutex sync.Mutex
	acknowledged := map[uint64]string{}
	for proposer := 0; proposer < proposers; proposer++ {
		go func(proposer int) {
			defer done.Done()
			for nth := 0; nth < each; nth++ {
				if nth == half {
					reached.Done()
				}
				text := fmt.Sprintf("%d/%d", proposer, nth)
				index, err := writer.Propose(ctx, []byte(text))
				if err != nil {
					t.Errorf("%s: %v", text, err)
					return
				}
				mutex.Lock()
				acknowledged[index] = text
				mutex.Unlock()
			}
		}(proposer)
	}
	reached.Wait()
	leader := cluster.leader(ctx, client, "")
	cluster.kill(leader)
	done.Wait()
	if t.Failed() {
		return
	}
	cluster.start(leader)

	first := cluster.read(ctx, hosts[0], proposers*each)
	seen := map[string]bool{}
	var last uint64
	for _, entry := range first {
		text := string(entry.Data)
		if seen[text] || entry.Index <= last || entry.By != "test" {
			t.Fatalf("twice, or out of order: %+v", entry)
		}
		seen[text], last = true, entry.Index
		// 0: it was agreed, and where is not known any more.
		if told, known := acknowledged[entry.Index]; known && told != text {
			t.Fatalf("%q was acknowledged at %d, where %q is", told, entry.Index, text)
		}
	}
	if len(seen) != proposers*each {
		t.Fatalf("%d entries of %d", len(seen), proposers*each)
	}
	for _, host := range hosts[1:] {
		for at, entry := range cluster.read(ctx, host, proposers*each) {
			if entry.Index != first[at].Index || string(entry.Data) != string(first[at].Data) {
				t.Fatalf("host %s has %+v, host %s %+v", host, entry, hosts[0], first[at])
			}
		}
	}
	testbed.Until(t, "the log is removed", func() error { return client.Remove(ctx, "jobs") })
}

func TestWhatIsWrongIsSaidInOneLine(t *testing.T) {
	cluster := newCluster(t)
	for _, host := range hosts {
		cluster.start(host)
	}
	ctx, end := context.WithTimeout(context.Background(), patience)
	defer end()
	client := cluster.client("a")
	var refused *Refused
	if err := client.Create(ctx, "jobs", "a", "nobody"); !errors.As(err, &refused) || refused.Code != 2 {
		t.Fatalf("a host that is not in the cluster: %v", err)
	}
	writer := client.NewWriter("nothing", "test", 1)
	if _, err := writer.Propose(ctx, []byte("x")); !errors.As(err, &refused) {
		t.Fatalf("no such log: %v", err)
	}
	writer.Close()
	if err := client.Create(ctx, "jobs", "a"); err != nil {
		t.Fatal(err)
	}
	writer = client.NewWriter("jobs", "test", 7)
	defer writer.Close()
	if _, err := writer.Propose(ctx, make([]byte, MostEntryBytes+1)); err == nil {
		t.Fatal("an entry that is too large was taken")
	}
	_, err := writer.Propose(ctx, []byte("x"))
	if !errors.As(err, &refused) || !strings.Contains(err.Error(), "next number is 1") {
		t.Fatalf("a number out of turn: %v", err)
	}
}
