// Three dragonboat replicas as three processes on this machine: latency and throughput of one group.
// Run by `cargo xtask bench consensus`; prints one JSON line per measurement on the process that leads.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lni/dragonboat/v3"
	"github.com/lni/dragonboat/v3/config"
	"github.com/lni/dragonboat/v3/logger"
	sm "github.com/lni/dragonboat/v3/statemachine"
)

const cluster = 1

// counter applies nothing but counts: the cheapest state machine there is.
type counter struct{ n uint64 }

func (c *counter) Update([]byte) (sm.Result, error)        { c.n++; return sm.Result{Value: c.n}, nil }
func (c *counter) Lookup(interface{}) (interface{}, error) { return c.n, nil }
func (c *counter) SaveSnapshot(w io.Writer, _ sm.ISnapshotFileCollection, _ <-chan struct{}) error {
	_, err := fmt.Fprint(w, c.n)
	return err
}
func (c *counter) RecoverFromSnapshot(r io.Reader, _ []sm.SnapshotFile, _ <-chan struct{}) error {
	_, err := fmt.Fscan(r, &c.n)
	return err
}
func (c *counter) Close() error { return nil }

type result struct {
	Payload     int     `json:"payload_bytes"`
	Outstanding int     `json:"outstanding"`
	P50         float64 `json:"p50_us"`
	P99         float64 `json:"p99_us"`
	PerSecond   float64 `json:"per_s"`
}

func measure(nh *dragonboat.NodeHost, payload, outstanding int, length time.Duration) result {
	session := nh.GetNoOPSession(cluster)
	var mutex sync.Mutex
	var all []float64
	var group sync.WaitGroup
	begin := time.Now()
	end := begin.Add(length)
	for i := 0; i < outstanding; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			command := make([]byte, payload)
			var mine []float64
			for time.Now().Before(end) {
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				t := time.Now()
				_, err := nh.SyncPropose(ctx, session, command)
				cancel()
				if err == nil {
					mine = append(mine, float64(time.Since(t).Nanoseconds())/1e3)
				}
			}
			mutex.Lock()
			all = append(all, mine...)
			mutex.Unlock()
		}()
	}
	group.Wait()
	elapsed := time.Since(begin).Seconds()
	sort.Float64s(all)
	if len(all) == 0 {
		return result{Payload: payload, Outstanding: outstanding}
	}
	return result{payload, outstanding, all[len(all)/2], all[len(all)*99/100], float64(len(all)) / elapsed}
}

func main() {
	node := flag.Uint64("node", 0, "0: start the three others")
	dir := flag.String("dir", "", "data directory (a tmpfs for the figures in memory)")
	ports := flag.String("ports", "", "three ports")
	seconds := flag.Float64("seconds", 1, "length of one measurement")
	flag.Parse()
	if *node == 0 {
		runtime.LockOSThread() // the children die with the thread that started them
		var children []*exec.Cmd
		for i := 1; i <= 3; i++ {
			c := exec.Command(os.Args[0], append([]string{"-node", fmt.Sprint(i)}, os.Args[1:]...)...)
			c.Stdout = os.Stdout
			c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			if err := c.Start(); err != nil {
				panic(err)
			}
			children = append(children, c)
		}
		// The one that leads ends when it has measured; the others are of no use after that.
		ended := make(chan struct{}, 3)
		for _, c := range children {
			go func(c *exec.Cmd) { c.Wait(); ended <- struct{}{} }(c)
		}
		<-ended
		for _, c := range children {
			c.Process.Kill()
		}
		return
	}
	for _, name := range []string{"raft", "rsm", "transport", "grpc", "dragonboat", "logdb", "config", "settings", "util"} {
		logger.GetLogger(name).SetLevel(logger.ERROR)
	}
	members := map[uint64]string{}
	for i, port := range strings.Split(*ports, ",") {
		members[uint64(i+1)] = "127.0.0.1:" + port
	}
	home := filepath.Join(*dir, fmt.Sprint(*node))
	nh, err := dragonboat.NewNodeHost(config.NodeHostConfig{
		WALDir: home, NodeHostDir: home, RTTMillisecond: 5, RaftAddress: members[*node],
	})
	if err != nil {
		panic(err)
	}
	rc := config.Config{NodeID: *node, ClusterID: cluster, ElectionRTT: 10, HeartbeatRTT: 1, CheckQuorum: true}
	create := func(uint64, uint64) sm.IStateMachine { return &counter{} }
	if err := nh.StartCluster(members, false, create, rc); err != nil {
		panic(err)
	}
	for {
		leader, ok, err := nh.GetLeaderID(cluster)
		if err == nil && ok {
			if leader != *node {
				select {} // followers serve until they are killed
			}
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	measure(nh, 64, 8, 500*time.Millisecond)
	for _, payload := range []int{64, 1024, 16384} {
		for _, outstanding := range []int{1, 8, 64} {
			line, _ := json.Marshal(measure(nh, payload, outstanding, time.Duration(*seconds*float64(time.Second))))
			fmt.Println(string(line))
		}
	}
}
