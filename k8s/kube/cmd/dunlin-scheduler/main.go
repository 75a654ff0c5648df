// Command dunlin-scheduler is kube-scheduler with one more plugin: TRIPOD's, which binds a task's copies by agreed places (docs/kubernetes.md).
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"

	"dunlin.dev/k8s/kube/scheduler"
)

func main() {
	os.Exit(cli.Run(app.NewSchedulerCommand(app.WithPlugin(scheduler.Name, scheduler.New))))
}
