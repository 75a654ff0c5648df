// Puts against a running etcd cluster: latency and throughput. Run by `cargo xtask bench consensus`, which starts the
// three nodes; prints one JSON line per measurement.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"sort"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

type result struct {
	Payload     int     `json:"payload_bytes"`
	Outstanding int     `json:"outstanding"`
	P50         float64 `json:"p50_us"`
	P99         float64 `json:"p99_us"`
	PerSecond   float64 `json:"per_s"`
}

func measure(client *clientv3.Client, payload, outstanding int, length time.Duration) result {
	var mutex sync.Mutex
	var all []float64
	var group sync.WaitGroup
	begin := time.Now()
	end := begin.Add(length)
	for i := 0; i < outstanding; i++ {
		group.Add(1)
		go func(i int) {
			defer group.Done()
			value := strings.Repeat("x", payload)
			var mine []float64
			for time.Now().Before(end) {
				t := time.Now()
				if _, err := client.Put(context.Background(), fmt.Sprint("k", i), value); err == nil {
					mine = append(mine, float64(time.Since(t).Nanoseconds())/1e3)
				}
			}
			mutex.Lock()
			all = append(all, mine...)
			mutex.Unlock()
		}(i)
	}
	group.Wait()
	elapsed := time.Since(begin).Seconds()
	sort.Float64s(all)
	if len(all) == 0 {
		return result{Payload: payload, Outstanding: outstanding}
	}
	return result{payload, outstanding, all[len(all)/2], all[len(all)*99/100], float64(len(all)) / elapsed}
}

// leader finds the endpoint whose node leads, so that no put is forwarded.
func leader(endpoints []string) string {
	for {
		for _, endpoint := range endpoints {
			client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: time.Second})
			if err != nil {
				continue
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			status, err := client.Status(ctx, endpoint)
			cancel()
			client.Close()
			if err == nil && status.Leader == status.Header.MemberId {
				return endpoint
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func main() {
	endpoints := flag.String("endpoints", "", "client URLs, separated by commas")
	seconds := flag.Float64("seconds", 1, "length of one measurement")
	flag.Parse()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{leader(strings.Split(*endpoints, ","))}})
	if err != nil {
		panic(err)
	}
	measure(client, 64, 8, 500*time.Millisecond)
	for _, payload := range []int{64, 1024, 16384} {
		for _, outstanding := range []int{1, 8, 64} {
			line, _ := json.Marshal(measure(client, payload, outstanding, time.Duration(*seconds*float64(time.Second))))
			fmt.Println(string(line))
		}
	}
}
