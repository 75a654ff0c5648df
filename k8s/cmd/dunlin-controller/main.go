// Command dunlin-controller is one of TRIPOD's controllers, over a shared log of Dunlin's (docs/kubernetes.md).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"dunlin.dev/k8s/allocation"
	"dunlin.dev/k8s/controller"
	"dunlin.dev/k8s/trial"
	"dunlin.dev/log"
)

func main() {
	timing := allocation.DefaultTiming
	name := flag.String("name", "", "this controller's name; each has another one")
	logName := flag.String("log", "tripod", "the shared log that the controllers agree in ('dunlin log create')")
	socket := flag.String("socket", log.Socket, "the control sockets of the hosts' daemons, by commas, the own one first")
	cluster := flag.String("trial", "", "the socket of a cluster for trying")
	flag.DurationVar(&timing.Alive, "alive", timing.Alive, "how often it says that it is alive")
	flag.DurationVar(&timing.Dead, "dead", timing.Dead, "after which silence a controller counts as dead")
	flag.Parse()
	if *name == "" || *cluster == "" || flag.NArg() > 0 {
		fail(2, "it needs --name and --trial: see --help")
	}
	if timing.Alive <= 0 || timing.Dead < 2*timing.Alive {
		fail(2, "--alive is more than 0, and --dead at least twice that")
	}
	ctx, end := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer end()
	err := controller.Run(ctx, controller.Config{
		Name: *name, Log: *logName, Client: log.New(strings.Split(*socket, ",")...), Cluster: trial.NewClient(*name, *cluster), Timing: timing,
		Say: func(line string) { fmt.Printf("controller %s: %s\n", *name, line) },
	})
	if err != nil && !errors.Is(err, context.Canceled) {
		fail(1, err.Error())
	}
}

func fail(code int, why string) {
	fmt.Fprintln(os.Stderr, "dunlin-controller: "+why)
	os.Exit(code)
}
