// Command dunlin-pause waits until it is told to end: it is what a Pod that stands for a copy runs, and what may hold a Pod's namespaces on a node whose
// containerd reaches no registry (docs/kubernetes.md).
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	if len(os.Args) > 1 {
		fmt.Fprintf(os.Stderr, "dunlin-pause waits for SIGTERM or SIGINT, and takes nothing: nobody knows what '%s' means\n", os.Args[1])
		os.Exit(2)
	}
	// The first process of a Pod whose containers share their processes gets the children of those that have ended.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for signal := range signals {
		if signal != syscall.SIGCHLD {
			return
		}
		for {
			// One signal may stand for many.
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}
