package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dunlin.dev/log/testbed"
)

// SchedulerArgs are a scheduler's, beside the daemons on these sockets.
func SchedulerArgs(controller string, sockets []string) string {
	return fmt.Sprintf("{controller: %s, sockets: [%s], aliveMilliseconds: 200, deadMilliseconds: 2000}", controller, strings.Join(sockets, ", "))
}

// Scheduler starts a dunlin-scheduler with these arguments, which talks to the API server by this kubeconfig.
func Scheduler(t testing.TB, kubeconfig, args string) *testbed.Process {
	t.Helper()
	return scheduler(t, "dunlin.dev/k8s/kube/cmd/dunlin-scheduler", SchedulerConfig(kubeconfig, args))
}

// SchedulerConfig is a dunlin-scheduler's file.
func SchedulerConfig(kubeconfig, args string) string {
	return config(kubeconfig, `  - schedulerName: dunlin-scheduler
    plugins:
      multiPoint: { enabled: [ { name: Tripod } ] }
      postFilter: { enabled: [ { name: Tripod } ] }
      bind: { enabled: [ { name: Tripod } ] }
    pluginConfig:
      - name: Tripod
        args: `+args+"\n")
}

// PlainScheduler starts a kube-scheduler as it is.
func PlainScheduler(t testing.TB, kubeconfig string) *testbed.Process {
	t.Helper()
	return scheduler(t, "k8s.io/kubernetes/cmd/kube-scheduler", config(kubeconfig, "  - schedulerName: default-scheduler\n"))
}

// Operator builds a dunlin-operator, with the race detector if the test has it, and returns its path.
func Operator(t testing.TB) string {
	t.Helper()
	return build(t, "dunlin.dev/k8s/kube/cmd/dunlin-operator", race)
}

func build(t testing.TB, command string, race bool) string {
	t.Helper()
	flags := []string{"-trimpath"}
	if race {
		flags = append(flags, "-race")
	}
	return testbed.Build(t, command, flags...)
}

// config is a scheduler's file. Neither of the two is held up by its client's limits.
func config(kubeconfig, profiles string) string {
	return fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: { leaderElect: false }
clientConnection: { kubeconfig: %s, qps: 5000, burst: 5000 }
profiles:
%s`, kubeconfig, profiles)
}

// scheduler starts one of the two.
func scheduler(t testing.TB, command, config string) *testbed.Process {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	// It is built with the race detector only where there is time: it imports much of Kubernetes that no test does.
	process, err := testbed.Start(t, nil, build(t, command, race && !testing.Short()), "--config", path, "--secure-port", "0")
	if err != nil {
		t.Fatal(err)
	}
	return process
}
