package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"dunlin.dev/k8s/kube/deploy"
	"dunlin.dev/log/testbed"
)

// SchedulerArgs are a scheduler's, beside the daemons on these sockets. One that is silent for five seconds counts as dead: with the race detector, on a busy machine, two are soon over.
func SchedulerArgs(controller string, sockets []string) string {
	return fmt.Sprintf("{controller: %s, sockets: [%s], aliveMilliseconds: 200, deadMilliseconds: 5000}", controller, strings.Join(sockets, ", "))
}

// Scheduler starts a dunlin-scheduler with these arguments, which talks to the API server by this kubeconfig.
func Scheduler(t testing.TB, kubeconfig, args string) *testbed.Process {
	t.Helper()
	return scheduler(t, "dunlin.dev/k8s/kube/cmd/dunlin-scheduler", SchedulerConfig(t, kubeconfig, args), race)
}

// SchedulerConfig is a dunlin-scheduler's file: that which its Pods have, with another way to the server and other arguments.
func SchedulerConfig(t testing.TB, kubeconfig, args string) string {
	t.Helper()
	config := map[string]any{}
	if err := yaml.UnmarshalStrict(deploy.Scheduler, &config); err != nil {
		t.Fatal(err)
	}
	config["clientConnection"] = clientConnection(kubeconfig)
	var given any
	if err := yaml.UnmarshalStrict([]byte(args), &given); err != nil {
		t.Fatal(err)
	}
	profile := config["profiles"].([]any)[0].(map[string]any)
	profile["pluginConfig"].([]any)[0].(map[string]any)["args"] = given
	text, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// clientConnection does not hold anybody up by a client's limits.
func clientConnection(kubeconfig string) map[string]any {
	return map[string]any{"kubeconfig": kubeconfig, "qps": 5000, "burst": 5000}
}

// PlainScheduler starts a kube-scheduler as it is.
func PlainScheduler(t testing.TB, kubeconfig string) *testbed.Process {
	t.Helper()
	config, err := yaml.Marshal(map[string]any{
		"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration", "leaderElection": map[string]any{"leaderElect": false},
		"clientConnection": clientConnection(kubeconfig), "profiles": []any{map[string]any{"schedulerName": "default-scheduler"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return scheduler(t, "k8s.io/kubernetes/cmd/kube-scheduler", string(config), false)
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

// scheduler starts one of the two. Whatever it asks for, its account may do.
func scheduler(t testing.TB, command, config string, race bool) *testbed.Process {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	process, err := testbed.Start(t, nil, build(t, command, race), "--config", path, "--secure-port", "0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if said := process.Said(); strings.Contains(said, "is forbidden") {
			t.Errorf("%s may not do what it has to: %s", filepath.Base(command), said)
		}
	})
	return process
}
