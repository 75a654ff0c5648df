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
	return scheduler(t, "dunlin.dev/k8s/kube/cmd/dunlin-scheduler", kubeconfig, `  - schedulerName: dunlin-scheduler
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
	return scheduler(t, "k8s.io/kubernetes/cmd/kube-scheduler", kubeconfig, "  - schedulerName: default-scheduler\n")
}

// scheduler starts one of the two. Neither is held up by its client's limits.
func scheduler(t testing.TB, command, kubeconfig, profiles string) *testbed.Process {
	t.Helper()
	config := fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: { leaderElect: false }
clientConnection: { kubeconfig: %s, qps: 5000, burst: 5000 }
profiles:
%s`, kubeconfig, profiles)
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	process, err := testbed.Start(t, nil, testbed.Build(t, command), "--config", path, "--secure-port", "0")
	if err != nil {
		t.Fatal(err)
	}
	return process
}
