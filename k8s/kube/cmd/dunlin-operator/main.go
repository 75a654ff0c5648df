// Command dunlin-operator carries out ProtectedVMs and ProtectedPrograms with the daemon of Dunlin's on its node (docs/kubernetes.md). One runs on each node that has a daemon.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/operator"
)

// version is what 'cargo xtask k8s images' writes here.
var version = "of no image"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "dunlin-operator:", err)
		os.Exit(1)
	}
}

func run() error {
	var options operator.Options
	var bridges, users string
	var asked bool
	flag.BoolVar(&asked, "version", false, "say the version, and end")
	flag.StringVar(&options.Node, "node", os.Getenv("NODE_NAME"), "this Kubernetes node, which is its daemon's host; or NODE_NAME in the environment")
	flag.StringVar(&options.Socket, "socket", control.Socket, "the daemon's control socket")
	flag.StringVar(&options.Limits.Images, "images", "/var/lib/dunlin/images", "a folder with a folder for each namespace, in which kernels, initrds and disks of its VMs lie")
	flag.StringVar(&options.Limits.Programs, "programs", "/var/lib/dunlin/programs", "a folder with a folder for each namespace, in which executables of its programs lie, or links to them")
	flag.StringVar(&users, "users", "nobody", "users of this host as whom programs may run, with commas between them; root only if it is named")
	flag.StringVar(&bridges, "bridges", "", "bridges of this host that cards may join, with commas between them")
	flag.StringVar(&options.Namespace, "namespace", "dunlin-system", "the namespace of the lease by which one operator is elected")
	flag.StringVar(&options.Image, "image", "registry.k8s.io/pause:3.10.1", "what the Pods that stand for copies run")
	flag.StringVar(&options.PriorityClass, "priority-class", "", "the PriorityClass of these Pods, so that no other Pod takes their copies' memory; nothing if there is none for them")
	flag.StringVar(&options.Metrics, "metrics", "127.0.0.1:8085", "where metrics are served, as HOST:PORT; 0 is nowhere")
	flag.DurationVar(&options.Beat, "beat", 10*time.Second, "how often this host says that it is there; four beats of silence, and it counts as gone")
	flag.DurationVar(&options.LostAfter, "lost-after", 5*time.Minute, "how long nothing may be heard of a host before its copies are made anew on others")
	flag.DurationVar(&options.Grace, "grace", time.Minute, "how long a guest or a program may take to end when its object is deleted")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("nobody knows what '%s' means; --help lists what there is", flag.Arg(0))
	}
	if asked {
		fmt.Println("dunlin-operator", version)
		return nil
	}
	words := func(text string) []string {
		return strings.FieldsFunc(text, func(letter rune) bool { return letter == ',' || letter == ' ' })
	}
	options.Limits.Bridges, options.Limits.Users = words(bridges), words(users)
	if err := options.Check(); err != nil {
		return err
	}
	ctrl.SetLogger(klog.NewKlogr())
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	return operator.Run(ctrl.SetupSignalHandler(), config, options)
}
