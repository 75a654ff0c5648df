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
	config := fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: { leaderElect: false }
clientConnection: { kubeconfig: %s, qps: 500, burst: 500 }
profiles:
  - schedulerName: dunlin-scheduler
    plugins:
      multiPoint: { enabled: [ { name: Tripod } ] }
      postFilter: { enabled: [ { name: Tripod } ] }
      bind: { enabled: [ { name: Tripod } ] }
    pluginConfig:
      - name: Tripod
        args: %s
`, kubeconfig, args)
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	program := testbed.Build(t, "dunlin.dev/k8s/kube/cmd/dunlin-scheduler")
	process, err := testbed.Start(t, nil, program, "--config", path, "--secure-port", "0")
	if err != nil {
		t.Fatal(err)
	}
	return process
}
