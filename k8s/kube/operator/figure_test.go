package operator_test

import (
	"context"
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// The paper's figure (APSys'16): redis under TRIPOD beside redis that the same scheduler has placed once, by throughput and response time. 'cargo xtask k8s figure'
// says how much is measured; otherwise it is little, and shows that the measurement works. The paper's R is 3, with three copies that run. Here two copies run with R = 2 and with
// R = 3, and with 3 there is a standby on a further host, which runs none.

// connections are how many clients there are at once.
var connections = []int{1, 50}

// commands are redis'.
var commands = []string{"set", "get"}

// figure is what is measured.
type figure struct {
	*cluster
	// pairs of windows, one with copies and one without, and requests of each window with the most connections.
	pairs, requests int
	// strength is R of the side with copies.
	strength int
	windows  []pair
	// from is the host that clients are on: it has no copy.
	from string
}

// window is what redis-benchmark says of one command, and how busy all processors were.
type window struct{ rate, meanMs, p99Ms, busy float64 }

// pair are two windows, one after the other.
type pair struct {
	what, command     string
	connections       int
	alone, replicated window
}

// given is the environment's number, or this one.
func given(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	number, err := strconv.Atoi(text)
	if err != nil || number <= 0 {
		t.Fatalf("%s is a number above 0, not '%s'", variable, text)
	}
	return number
}

func TestRedisWithCopiesBesideRedisAlone(t *testing.T) {
	kinds := []string{"program"}
	if text := os.Getenv("DUNLIN_FIGURE_KINDS"); text != "" {
		kinds = strings.Split(text, ",")
	}
	strength := given(t, "DUNLIN_FIGURE_STRENGTH", 2)
	var more []string
	switch {
	case strength == 3 && slices.Equal(kinds, []string{"vm"}):
		// The witness and the standby are two hosts.
		more = []string{"d"}
	case strength != 2:
		t.Fatalf("DUNLIN_FIGURE_STRENGTH is 2, or 3 where DUNLIN_FIGURE_KINDS is vm")
	}
	figure := &figure{cluster: beginWith(t, "5m", more...), pairs: given(t, "DUNLIN_FIGURE_PAIRS", 1), requests: given(t, "DUNLIN_FIGURE_REQUESTS", 500), strength: strength}
	for _, kind := range kinds {
		switch kind {
		case "program":
			figure.program()
		case "vm":
			figure.vm()
		default:
			t.Fatalf("DUNLIN_FIGURE_KINDS has program and vm, not '%s'", kind)
		}
	}
	figure.print()
}

// program: redis as a ProtectedProgram, and as a process on the node that the scheduler has given to an ordinary Pod: no kubelet is there to start it.
func (figure *figure) program() {
	figure.executable()
	program := figure.sessions("figure")
	// What it may use of the processors is not what is measured.
	program.Spec.Program.MilliCPU = 2000
	figure.create(program)
	figure.untilSaysOf(program, operator.Protected, metav1.ConditionTrue, "complete second copy")
	figure.from = program.Status.Witness
	pod := lab.Pod("alone", "100m", "256Mi")
	// On the node whose copy speaks, so that a client's way is the same.
	pod.Spec.NodeSelector = map[string]string{v1.LabelHostname: program.Status.Primary}
	figure.create(pod)
	testbed.Until(figure.T, "the scheduler has placed the Pod", func() error {
		if err := figure.api.Get(context.Background(), client.ObjectKeyFromObject(pod), pod); err != nil || pod.Spec.NodeName == "" {
			return fmt.Errorf("it has no node: %v", err)
		}
		return nil
	})
	address, port := figure.hosts.Address(pod.Spec.NodeName), "6380"
	command := figure.hosts.Command(pod.Spec.NodeName, filepath.Join(figure.programs, "default", "redis-server"), "--bind", address, "--port", port,
		"--protected-mode", "no", "--save", "", "--appendonly", "no").Args
	process, err := testbed.Start(figure.T, nil, command[0], command[1:]...)
	if err != nil {
		figure.Fatal(err)
	}
	process.Until(figure.T, "Ready to accept connections")
	nothing := func() {}
	for at := 0; at < figure.pairs; at++ {
		figure.pair(at, "program", program, side{nothing, address, port, 10}, side{nothing, service, "6379", 1})
	}
	process.Kill()
	if err := figure.api.Delete(context.Background(), pod); err != nil {
		figure.Fatal(err)
	}
	figure.endOf(program)
}

// vm: redis in a ProtectedVM, whose strength changes to 1 and back while it runs.
func (figure *figure) vm() {
	asked := figure.shop("figure")
	asked.Spec.Strength = figure.strength
	for _, host := range figure.hosts.Names {
		figure.host(host, metav1.ConditionTrue)
	}
	figure.create(asked)
	isStrong := func(vm *v1alpha1.ProtectedVM) bool {
		return isProtected(vm) && (vm.Status.Standby != "") == (figure.strength == 3)
	}
	vm := figure.until("figure", "it is protected, with a standby if one is asked for", isStrong)
	figure.from = vm.Status.Witness
	figure.increments(figure.from, guest, ":1")
	set := func(strength int, policy string, is func(*v1alpha1.ProtectedVM) bool) {
		figure.change("figure", func(spec *v1alpha1.ProtectedVMSpec) { spec.Strength, spec.Policy = strength, policy })
		figure.until("figure", fmt.Sprintf("its strength is %d", strength), func(now *v1alpha1.ProtectedVM) bool {
			*vm = *now
			return now.Status.ObservedGeneration == now.Generation && meta.IsStatusConditionTrue(now.Status.Conditions, operator.AsAsked) && is(now)
		})
	}
	for at := 0; at < figure.pairs; at++ {
		figure.pair(at, "VM", vm, side{func() { set(1, "none", func(now *v1alpha1.ProtectedVM) bool { return !isProtected(now) }) }, guest, "6379", 1},
			side{func() { set(figure.strength, "dunlin", isStrong) }, guest, "6379", 1})
	}
	set(figure.strength, "dunlin", isStrong)
	figure.endOf(vm)
}

// side is a redis, and what is to be done before it is measured.
type side struct {
	prepare       func()
	address, port string
	// times is how many times as many requests it gets, so that a faster one is measured for as long.
	times int
}

// pair measures both, one after the other; which is first changes all the time. It fails if the second copy was lost meanwhile.
func (figure *figure) pair(at int, what string, object v1alpha1.Protected, alone, replicated side) {
	figure.Helper()
	since := func() metav1.Time {
		figure.Helper()
		if err := figure.api.Get(context.Background(), client.ObjectKeyFromObject(object), object); err != nil {
			figure.Fatal(err)
		}
		condition := meta.FindStatusCondition(object.Seen().Conditions, operator.Protected)
		if condition == nil || condition.Status != metav1.ConditionTrue {
			figure.Fatalf("%s: the second copy was lost: %+v", what, object.Seen())
		}
		return condition.LastTransitionTime
	}
	for turn, many := range connections {
		var one, other map[string]window
		withoutCopies := func() {
			alone.prepare()
			one = figure.load(alone, many)
		}
		withCopies := func() {
			replicated.prepare()
			before := since()
			other = figure.load(replicated, many)
			if now := since(); !before.Equal(&now) {
				figure.Fatalf("%s: the second copy was lost, and is there again", what)
			}
		}
		if (at+turn)%2 == 0 {
			withCopies()
			withoutCopies()
		} else {
			withoutCopies()
			withCopies()
		}
		for _, command := range commands {
			figure.windows = append(figure.windows, pair{what, command, many, one[command], other[command]})
		}
	}
}

// load is redis-benchmark, from the network of the host that has no copy.
func (figure *figure) load(of side, connections int) map[string]window {
	figure.Helper()
	requests := figure.requests * of.times
	if connections == 1 {
		requests = max(requests/10, 50)
	}
	windows := map[string]window{}
	for _, command := range commands {
		total, idle := figure.processors()
		said, err := figure.hosts.Command(figure.from, "redis-benchmark", "-h", of.address, "-p", of.port, "-c", fmt.Sprint(connections), "-n", fmt.Sprint(requests),
			"-t", command, "--csv").Output()
		if err != nil {
			figure.Fatalf("redis-benchmark: %v: %s", err, said)
		}
		totalNow, idleNow := figure.processors()
		rows, err := csv.NewReader(strings.NewReader(string(said))).ReadAll()
		if err != nil || len(rows) != 2 || len(rows[0]) != len(rows[1]) {
			figure.Fatalf("redis-benchmark says %s: %v", said, err)
		}
		number := func(column string) float64 {
			figure.Helper()
			at := slices.Index(rows[0], column)
			if at < 0 {
				figure.Fatalf("redis-benchmark has no column %s: %s", column, said)
			}
			value, err := strconv.ParseFloat(rows[1][at], 64)
			if err != nil {
				figure.Fatal(err)
			}
			return value
		}
		windows[command] = window{number("rps"), number("avg_latency_ms"), number("p99_latency_ms"), 1 - (idleNow-idle)/max(totalNow-total, 1)}
	}
	return windows
}

// processors is the time that all of them have had, and what of it they had nothing to do, as the kernel counts it.
func (figure *figure) processors() (total, idle float64) {
	figure.Helper()
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		figure.Fatal(err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	for at, field := range strings.Fields(line)[1:9] {
		ticks, err := strconv.ParseFloat(field, 64)
		if err != nil {
			figure.Fatal(err)
		}
		total += ticks
		// Idle, and idle while a disk is waited for.
		if at == 3 || at == 4 {
			idle += ticks
		}
	}
	return total, idle
}

func median(values []float64) float64 {
	sort.Float64s(values)
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}

// print shows medians as a table of Markdown; the shares are medians of what each pair has.
func (figure *figure) print() {
	what := map[int]string{2: "two copies", 3: "two copies and a standby, which runs none"}[figure.strength]
	fmt.Printf("\nredis under TRIPOD, R = %d (%s), %d pairs of windows; VMs under QEMU's translator (TCG)\n\n", figure.strength, what, figure.pairs)
	fmt.Println("| redis in a | connections | command | alone: requests/s | mean, p99 | busy | with copies: requests/s | mean, p99 | busy | throughput | response time |")
	fmt.Println("|---|---|---|---|---|---|---|---|---|---|---|")
	for len(figure.windows) > 0 {
		first := figure.windows[0]
		var alike, others []pair
		for _, one := range figure.windows {
			if one.what == first.what && one.connections == first.connections && one.command == first.command {
				alike = append(alike, one)
			} else {
				others = append(others, one)
			}
		}
		of := func(value func(pair) float64) float64 {
			var values []float64
			for _, one := range alike {
				values = append(values, value(one))
			}
			return median(values)
		}
		side := func(window func(pair) window) string {
			return fmt.Sprintf("%.0f | %.2f, %.2f ms | %.0f %%", of(func(one pair) float64 { return window(one).rate }), of(func(one pair) float64 { return window(one).meanMs }),
				of(func(one pair) float64 { return window(one).p99Ms }), 100*of(func(one pair) float64 { return window(one).busy }))
		}
		fmt.Printf("| %s | %d | %s | %s | %s | %.1f %% | %.1f %% |\n", first.what, first.connections, first.command,
			side(func(one pair) window { return one.alone }), side(func(one pair) window { return one.replicated }),
			100*of(func(one pair) float64 { return one.replicated.rate / one.alone.rate }), 100*of(func(one pair) float64 { return one.replicated.meanMs / one.alone.meanMs }))
		figure.windows = others
	}
	fmt.Println()
}
