package log

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dunlin.dev/log/testbed"
)

// most are the entries until a full disk has to be noticed: more than a log keeps, and its files have room for.
const most = 500

// small gives a host a state folder on a file system of its own.
func (cluster *cluster) small(host string) {
	cluster.t.Helper()
	state := filepath.Join(cluster.Folder(host), "state")
	if err := os.MkdirAll(state, 0o700); err != nil {
		cluster.t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", state, "tmpfs", 0, "size=48m,mode=700"); err != nil {
		cluster.t.Fatal(err)
	}
	cluster.t.Cleanup(func() {
		// Its daemon has ended by now, or ends in a moment.
		if err := syscall.Unmount(state, syscall.MNT_DETACH); err != nil {
			cluster.t.Error(err)
		}
	})
}

func (cluster *cluster) filler(host string) string {
	return filepath.Join(cluster.Folder(host), "state", "filler")
}

// fill leaves nothing free on a host's file system.
func (cluster *cluster) fill(host string) {
	cluster.t.Helper()
	file, err := os.Create(cluster.filler(host))
	if err != nil {
		cluster.t.Fatal(err)
	}
	defer file.Close()
	block := make([]byte, 4096)
	for err == nil {
		_, err = file.Write(block)
	}
	if !strings.Contains(err.Error(), "no space left") {
		cluster.t.Fatal(err)
	}
}

func (cluster *cluster) isFull(ctx context.Context, host string) {
	cluster.t.Helper()
	testbed.Until(cluster.t, "host "+host+" says that its disk is full", func() error {
		status, err := cluster.client(host).Status(ctx, "jobs")
		if err == nil && (status.State != "disk-full" || status.Why == "" || strings.Contains(status.Why, "\n") || status.Leader == host) {
			err = fmt.Errorf("it says '%s: %s', and host '%s' leads", status.State, status.Why, status.Leader)
		}
		return err
	})
}

// A full disk costs a host its office and nothing else; without a majority that has room a writer gets one line; when there is room again it goes on by itself, and
// what was acknowledged is there.
func TestAFullDiskIsSaidInOneLine(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a small file system is mounted by root")
	}
	cluster := newCluster(t)
	for _, host := range hosts {
		cluster.small(host)
		cluster.start(host)
	}
	ctx, end := context.WithTimeout(context.Background(), 2*patience)
	defer end()
	client := cluster.client(hosts...)
	testbed.CreateLog(t, ctx, client, "jobs", hosts...)
	writer := client.NewWriter("jobs", "test", 1)
	defer writer.Close()
	said := 0
	say := func(count int) {
		t.Helper()
		for ; count > 0; count-- {
			said++
			// Large, so that no room that is kept free helps for long.
			if _, err := writer.Propose(ctx, bytes.Repeat([]byte{byte(said)}, 100<<10)); err != nil {
				t.Fatalf("entry %d: %v", said, err)
			}
		}
	}
	say(3)
	first := cluster.leader(ctx, client, "")
	cluster.fill(first)
	// It has room of its own for a while, that it took before.
	for isFull := false; !isFull && said < most; {
		say(10)
		status, err := cluster.client(first).Status(ctx, "jobs")
		isFull = err == nil && status.State == "disk-full"
	}
	cluster.isFull(ctx, first)

	second := cluster.leader(ctx, client, first)
	cluster.fill(second)
	why := cluster.refusal(ctx, client)
	if strings.Contains(why, "\n") || !strings.Contains(why, "majority") && !strings.Contains(why, "leads") {
		t.Errorf("a writer without a majority is told: %s", why)
	}
	t.Logf("a writer is told: %s", why)

	if err := os.Remove(cluster.filler(second)); err != nil {
		t.Fatal(err)
	}
	say(3)
	if err := os.Remove(cluster.filler(first)); err != nil {
		t.Fatal(err)
	}
	for _, host := range hosts {
		at := 0
		for _, entry := range cluster.read(ctx, host, said) {
			if entry.By != "test" {
				continue
			}
			if at++; entry.Data[0] != byte(at) || len(entry.Data) != 100<<10 {
				t.Fatalf("host %s: entry %d is of %d bytes, %d", host, at, len(entry.Data), entry.Data[0])
			}
		}
	}
}

// refusal is what a writer hears that does not say anything again.
func (cluster *cluster) refusal(ctx context.Context, client *Client) string {
	cluster.t.Helper()
	late := time.Now().Add(patience)
	for number := uint64(1); time.Now().Before(late); {
		talk, err := client.ask(ctx, map[string]any{"ask": "write", "log": "jobs", "by": "impatient"})
		if err != nil {
			cluster.t.Fatal(err)
		}
		heard, err := talk.hear()
		for err == nil && heard.Said != "refused" {
			if heard.Said == "agreed" {
				number++
			}
			if err = talk.Say(map[string]any{"number": number, "data": bytes.Repeat([]byte{7}, 64<<10)}); err == nil {
				heard, err = talk.hear()
			}
		}
		talk.Close()
		if err != nil {
			// A daemon that passes a writer on hangs up when the one that led is gone: another conversation tells why.
			cluster.t.Logf("a writer hears: %v", err)
			client.another()
			continue
		}
		// A leader that goes says so, and somebody else may lead.
		if strings.Contains(heard.Why, "majority") {
			return heard.Why
		}
		cluster.t.Logf("a writer is told: %s", heard.Why)
	}
	cluster.t.Fatal("nobody is refused")
	return ""
}
