// Package scale has the test of how many Pods are bound in a second, and how long each waits, with Dunlin's scheduler and with kube-scheduler alone, on as many
// nodes and with as many tasks as the environment says ('cargo xtask k8s scale'). Otherwise it is a small one that shows that the measurement works.
//
// Nodes are objects: no kubelet is there, and nothing runs. All else is real: API server, etcd, kube-scheduler, three daemons, and three dunlin-schedulers.
package scale_test

import (
	"context"
	"fmt"
	"math/rand"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// given is a number of the environment's, or this one.
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

// courses are what dunlin-schedulers are measured with, in this order: those that the environment names, or all.
func courses(t *testing.T) (given []string) {
	t.Helper()
	all := []string{"single", "triple", "mixed"}
	text := os.Getenv("DUNLIN_SCALE_COURSES")
	if text == "" {
		return all
	}
	for _, name := range strings.Split(text, ",") {
		if !slices.Contains(all, name) {
			t.Fatalf("DUNLIN_SCALE_COURSES has single, triple or mixed, not '%s'", name)
		}
		given = append(given, name)
	}
	return given
}

// plain makes as many Pods as there are tasks, for kube-scheduler.
func plain(tasks int) (pods []*v1.Pod) {
	for at := 0; at < tasks; at++ {
		pod := lab.Pod(fmt.Sprintf("p%d", at), cpu, memory)
		pod.Spec.SchedulerName = v1.DefaultSchedulerName
		pods = append(pods, pod)
	}
	return pods
}

// replicated makes the Pods of tasks, whose R it is told. No course has a name of another one's: what becomes of a task that is made again is not measured.
func replicated(course string, tasks int, strength func() int) (pods []*v1.Pod) {
	for at := 0; at < tasks; at++ {
		of, name := strength(), fmt.Sprintf("%s-%d", course, at)
		if of == 1 {
			pods = append(pods, lab.Pod(name, cpu, memory))
			continue
		}
		for copy := 0; copy < of; copy++ {
			pods = append(pods, lab.Copy(name, copy, of, cpu, memory))
		}
	}
	return pods
}

// What each Pod asks for: nodes have room for forty of them.
const cpu, memory = "100m", "64Mi"

func TestEveryPodIsBoundAndHowFast(t *testing.T) {
	nodes, tasks := given(t, "DUNLIN_SCALE_NODES", 30), given(t, "DUNLIN_SCALE_TASKS", 60)
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewSource(seed))
	course := begin(t, nodes)
	fmt.Printf("\n%d nodes, %d tasks, %d processors\n\n", nodes, tasks, runtime.NumCPU())

	before := course.plainly("before", tasks)
	course.plane.Rights(t)
	course.hosts.Start(t)
	lab.BeginLog(t, course.hosts)
	schedulers := map[string]*testbed.Process{}
	for _, name := range course.hosts.Names {
		args := fmt.Sprintf("{controller: %s, sockets: [%s]}", name, strings.Join(course.hosts.Sockets(name), ", "))
		schedulers[name] = lab.Scheduler(t, course.plane.KubeconfigAs(t, "scheduler-"+name, course.plane.Address(), lab.SchedulerAccount), args)
		schedulers[name].Until(t, "has read what is agreed")
	}
	ours := processes{"schedulers": nil, "daemons": nil}
	for _, name := range course.hosts.Names {
		ours["schedulers"] = append(ours["schedulers"], schedulers[name].Pid())
		ours["daemons"] = append(ours["daemons"], course.hosts.Process(name).Pid())
	}
	course.settle(replicated("first", 1, func() int { return 3 }))
	rows, all := []row{before}, courses(t)
	for at, name := range all {
		var pods []*v1.Pod
		var what string
		switch name {
		case "single":
			what, pods = "R = 1", replicated(name, tasks, func() int { return 1 })
		case "triple":
			what, pods = "R = 3", replicated(name, tasks/3, func() int { return 3 })
		case "mixed":
			what, pods = "R from 1 to 3", replicated(name, tasks, func() int { return 1 + random.Intn(3) })
		}
		rows = append(rows, course.run("dunlin-scheduler, "+what, ours, pods))
		if at == len(all)-1 {
			// What they do with what is deleted is not measured.
			for _, process := range schedulers {
				process.Kill()
			}
		}
		course.empty(pods)
	}
	rows = append(rows, course.plainly("after", tasks))
	print(rows)
	course.apart()
}

// plainly has kube-scheduler bind as many Pods as there are tasks.
func (course *course) plainly(when string, tasks int) row {
	course.Helper()
	plainly := lab.PlainScheduler(course.T, course.plane.Kubeconfig(course.T, "plain-"+when, course.plane.Address()))
	defer plainly.Kill()
	course.settle(plain(1))
	pods := plain(tasks)
	defer course.empty(pods)
	return course.run("kube-scheduler, "+when, processes{"schedulers": {plainly.Pid()}}, pods)
}

// print shows what was measured, as a table of Markdown.
func print(rows []row) {
	first, last := rows[0], rows[len(rows)-1]
	alone := (first.rate() + last.rate()) / 2
	fmt.Println("| | Pods | Pods a second | share of kube-scheduler's | p50 to bind | p99 to bind | CPU seconds: server and etcd | schedulers | daemons | client |")
	fmt.Println("|---|---|---|---|---|---|---|---|---|---|")
	for _, row := range rows {
		fmt.Printf("| %s | %d | %.1f | %.2f | %.2f s | %.2f s | %.1f | %.1f | %.1f | %.1f |\n", row.what, len(row.waits), row.rate(), row.rate()/alone,
			row.wait(0.50).Seconds(), row.wait(0.99).Seconds(), row.cpu["plane"], row.cpu["schedulers"], row.cpu["daemons"], row.cpu["client"])
	}
	fmt.Println()
}

// settle has a few Pods bound first, so that what is measured does not begin with a program's own start.
func (course *course) settle(pods []*v1.Pod) {
	course.Helper()
	course.run("a first one", nil, pods)
	course.empty(pods)
}

// patient is how long nothing may be bound.
func patient(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, testbed.Patience)
}
