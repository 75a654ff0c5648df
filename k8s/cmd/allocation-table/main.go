// Command allocation-table compares ways to give replicated tasks places, and prints the table of docs/kubernetes.md.
package main

import (
	"flag"
	"fmt"

	"dunlin.dev/k8s/allocation"
)

func main() {
	seeds := flag.Int("seeds", 10, "how many workloads")
	first := flag.Int64("first", 1, "the first one's seed")
	nodes := flag.Int("nodes", 60, "nodes, in three zones")
	ticks := flag.Int("ticks", 1000, "for how long tasks arrive")
	flag.Parse()
	for _, services := range []bool{false, true} {
		if services {
			fmt.Println("\nTasks that never end:")
		} else {
			fmt.Println("Tasks that end:")
		}
		fmt.Println("\n| load | scheme | useful | held in vain | R > 1 placed | its mean wait | R = 1 placed | its mean wait | jammed |")
		fmt.Println("|---|---|---|---|---|---|---|---|---|")
		for _, load := range []float64{0.6, 0.9, 1.2} {
			workload := allocation.Workload{Nodes: *nodes, Ticks: *ticks, Load: load, Services: services}
			for _, scheme := range []allocation.Scheme{allocation.Tripod, allocation.Undivided, allocation.AntiAffinity} {
				row(workload, scheme, *first, *seeds)
			}
		}
	}
}

// row is the mean over so many workloads.
func row(workload allocation.Workload, scheme allocation.Scheme, first int64, seeds int) {
	var sum allocation.Result
	for workload.Seed = first; workload.Seed < first+int64(seeds); workload.Seed++ {
		one := allocation.Compare(workload, scheme)
		sum.Useful += one.Useful / float64(seeds)
		sum.InVain += one.InVain / float64(seeds)
		sum.Jammed += one.Jammed
		add(&sum.Single, one.Single)
		add(&sum.Replicated, one.Replicated)
	}
	fmt.Printf("| %.1f | %s | %.1f %% | %.1f %% | %s | %.1f | %s | %.1f | %d |\n", workload.Load, scheme, 100*sum.Useful, 100*sum.InVain,
		share(sum.Replicated), sum.Replicated.MeanWait(), share(sum.Single), sum.Single.MeanWait(), sum.Jammed)
}

func add(sum *allocation.Served, one allocation.Served) {
	sum.Arrived += one.Arrived
	sum.Placed += one.Placed
	sum.Waited += one.Waited
}

func share(served allocation.Served) string {
	return fmt.Sprintf("%.1f %%", 100*float64(served.Placed)/float64(served.Arrived))
}
