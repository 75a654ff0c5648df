package operator_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// service is the address of the program.
const service = "10.77.0.11"

// user is whom the test's program runs as. A running program of another user is copied only by who has CAP_SYS_RESOURCE, and not every machine's root has.
func user(t *testing.T) string {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`CapEff:\s*([0-9a-f]+)`).FindSubmatch(status)
	if found == nil {
		t.Fatal("the kernel does not say which capabilities this process has")
	}
	effective, err := strconv.ParseUint(string(found[1]), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	const resource = 1 << 24
	if effective&resource != 0 {
		return "nobody"
	}
	return "root"
}

// sessions is a ProtectedProgram with redis.
func (cluster *cluster) sessions(name string) *v1alpha1.ProtectedProgram {
	return &v1alpha1.ProtectedProgram{
		ObjectMeta: named(name),
		Spec: v1alpha1.ProtectedProgramSpec{Program: v1alpha1.Program{
			Command: []string{filepath.Join(cluster.programs, "default", "redis-server"), "--protected-mode", "no", "--save", "", "--appendonly", "no"},
			User:    user(cluster.T), Port: 6379, MemoryMiB: 256, MilliCPU: 500, Tasks: 64,
			NICs: []v1alpha1.ProgramNIC{{MAC: "52:54:00:12:34:57", Bridge: "br0", Address: service + "/16"}},
		}},
	}
}

// executable puts a link to redis where the namespace's executables lie. Debian's redis-check-rdb is redis-server under another name.
func (cluster *cluster) executable() {
	cluster.Helper()
	redis, err := exec.LookPath("redis-check-rdb")
	if err != nil {
		cluster.Fatalf("'cargo xtask setup' installs redis: %v", err)
	}
	folder := filepath.Join(cluster.programs, "default")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		cluster.Fatal(err)
	}
	if err := os.Symlink(redis, filepath.Join(folder, "redis-server")); err != nil {
		cluster.Fatal(err)
	}
}

// root makes a root directory with redis, the libraries that it is linked to, and nothing else, among the namespace's executables.
func (cluster *cluster) root() string {
	cluster.Helper()
	root := filepath.Join(cluster.programs, "default", "root")
	redis, err := exec.LookPath("redis-check-rdb")
	if err != nil {
		cluster.Fatal(err)
	}
	linked, err := exec.Command("ldd", redis).Output()
	if err != nil {
		cluster.Fatalf("ldd %s: %v", redis, err)
	}
	files := map[string]string{redis: "/bin/redis-server"}
	for _, word := range strings.Fields(string(linked)) {
		if filepath.IsAbs(word) {
			files[word] = word
		}
	}
	for from, to := range files {
		data, err := os.ReadFile(from)
		if err != nil {
			cluster.Fatal(err)
		}
		place := filepath.Join(root, to)
		if err := os.MkdirAll(filepath.Dir(place), 0o755); err != nil {
			cluster.Fatal(err)
		}
		if err := os.WriteFile(place, data, 0o755); err != nil {
			cluster.Fatal(err)
		}
	}
	return root
}

// untilSaysOf waits for a condition of a program with these words.
func (cluster *cluster) untilSaysOf(program *v1alpha1.ProtectedProgram, kind string, status metav1.ConditionStatus, words string) {
	cluster.Helper()
	cluster.untilIs(program, kind+" of '"+program.Name+"' is "+string(status)+": "+words, func() bool { return says(program, kind, status, words) })
}

// A program from its manifest to its end, through what is not allowed, a drained node, and a dead host.
func TestProtectedProgramsAreCarriedOutByRealDaemons(t *testing.T) {
	cluster := beginWith(t, "5s")
	cluster.executable()
	cluster.runsNothingThatIsNotAllowed()
	cluster.keepsAProgramAlive()
	cluster.saysThatAProgramHasEnded()
}

// runsNothingThatIsNotAllowed: a namespace's programs are its own executables, and run as users and on bridges that a host's administrator named.
func (cluster *cluster) runsNothingThatIsNotAllowed() {
	shell := cluster.sessions("shell")
	shell.Spec.Program.Command = []string{"/bin/sh", "-c", "cat /etc/shadow"}
	other := cluster.sessions("other-user")
	other.Spec.Program.User = "daemon"
	bridge := cluster.sessions("bridge")
	bridge.Spec.Program.NICs[0].Bridge = "br1"
	root := cluster.sessions("root")
	root.Spec.Program.Root, root.Spec.Program.Command = "/usr", []string{"/bin/sh", "-c", "cat /share/common-licenses/BSD"}
	for words, program := range map[string]*v1alpha1.ProtectedProgram{
		"executables of namespace 'default', or links to them, lie in": shell, "may not run as user 'daemon'": other, "bridge 'br1' may not be used": bridge,
		"/usr may not be a program's root": root,
	} {
		cluster.create(program)
		cluster.untilSaysOf(program, operator.Running, metav1.ConditionFalse, words)
		cluster.event(program.Name, "NotAllowed", words)
		cluster.endOf(program)
	}
	// What the operator allows and the daemon does not.
	none := cluster.sessions("none")
	none.Spec.Program.Command[0] += "-that-is-not-there"
	cluster.create(none)
	cluster.untilSaysOf(none, operator.Running, metav1.ConditionFalse, "redis-server-that-is-not-there")
	cluster.event("none", "Refused", "redis-server-that-is-not-there")
	cluster.endOf(none)
	for _, name := range cluster.hosts.Names {
		cluster.nothingIsLeft(name)
	}
}

func (cluster *cluster) keepsAProgramAlive() {
	program := cluster.sessions("sessions")
	isProtected := func() bool { return meta.IsStatusConditionTrue(program.Status.Conditions, operator.Protected) }
	cluster.create(program)
	cluster.untilIs(program, "the program is protected", isProtected)
	members, witness := program.Status.Placement.Members, program.Status.Witness
	if program.Status.Primary != members[0] || program.Status.Backup != members[1] || witness == "" || program.Status.Strength != 2 {
		cluster.Errorf("%+v", program.Status)
	}
	cluster.event("sessions", "Placed", "on its hosts it is program 'sessions.")
	cluster.stands("sessions", 256+256, members)
	cluster.increments(witness, service, ":1")

	cluster.drain(members[0], "sessions-0")
	cluster.untilIs(program, "the program was handed over", func() bool { return program.Status.Primary == members[1] && program.Status.LastFailOver != nil })
	cluster.event("sessions", "HandedOver", "the program goes to host "+members[1])
	cluster.increments(witness, service, ":2")
	cluster.cordon(members[0], false)
	cluster.untilSaysOf(program, operator.Placed, metav1.ConditionTrue, "its hosts are")
	cluster.untilIs(program, "the running program was copied to the node that was drained", isProtected)
	cluster.increments(witness, service, ":3")

	dies, survives := program.Status.Primary, program.Status.Backup
	killed := time.Now()
	cluster.hosts.Kill(dies)
	cluster.operators[dies].Kill()
	cluster.untilIs(program, "the other host serves the program", func() bool { return program.Status.Primary == survives })
	cluster.Logf("the object says so %d ms after the kill", time.Since(killed).Milliseconds())
	cluster.increments(witness, service, ":4")
	cluster.event("sessions", "FailedOver", "host "+survives+" serves the program since")
	cluster.untilSaysOf(program, operator.Placed, metav1.ConditionFalse, "host '"+dies+"' is lost: nothing is heard of it: copy")
	cluster.untilSaysOf(program, operator.Placed, metav1.ConditionFalse, "since no other host is heard that has no part in the program")

	cluster.endOf(program)
	cluster.nothingIsLeft(survives)
	cluster.nothingIsLeft(witness)
	// The dead host comes back with its part of a program that is no more.
	cluster.hosts.Start(cluster.T, dies)
	cluster.operator(dies)
	cluster.nothingIsLeft(dies)
}

// Four real daemons: a lost host's copy of a running program goes to the one that has no part, which serves it when the primary's host is lost too.
func TestAProgramsCopyIsMadeAnewOnAnotherNode(t *testing.T) {
	cluster := beginWith(t, "5s", "d")
	cluster.executable()
	program := cluster.sessions("sessions")
	cluster.create(program)
	// hasCopies waits until it is protected by exactly these two.
	hasCopies := func(primary, backup string) {
		t.Helper()
		cluster.untilIs(program, "the program is protected on "+primary+" and "+backup, func() bool {
			status := program.Status
			return meta.IsStatusConditionTrue(status.Conditions, operator.Protected) && status.Primary == primary && status.Backup == backup && status.Moving == nil
		})
		cluster.stands("sessions", 256+256, program.Status.Placement.Members)
	}
	cluster.untilSaysOf(program, operator.Protected, metav1.ConditionTrue, "complete second copy")
	first, second, witness := program.Status.Primary, program.Status.Backup, program.Status.Witness
	fourth := cluster.hosts.Names[slices.IndexFunc(cluster.hosts.Names, func(name string) bool { return !slices.Contains(program.Status.Placement.Hosts(), name) })]
	cluster.increments(witness, service, ":1")

	cluster.dies(second)
	hasCopies(first, fourth)
	cluster.event("sessions", "Moved", "host "+fourth+" has the part in the program that host "+second+" had")
	cluster.increments(witness, service, ":2")
	cluster.returns(second)
	cluster.nothingIsLeft(second)

	cluster.dies(first)
	cluster.untilIs(program, "the fourth host serves it", func() bool { return program.Status.Primary == fourth })
	cluster.increments(witness, service, ":3")
	hasCopies(fourth, second)
	cluster.returns(first)
	cluster.nothingIsLeft(first)

	// A node that is drained while its host lives, and is well.
	cluster.drain(second, "sessions-"+strconv.Itoa(slices.Index(program.Status.Placement.Members, second)))
	hasCopies(fourth, first)
	cluster.nothingIsLeft(second)
	cluster.cordon(second, false)
	cluster.increments(witness, service, ":4")

	// The host without a part is the standby from now on, and gets a part by itself.
	before := program.DeepCopy()
	program.Spec.Strength = 3
	if err := cluster.api.Patch(context.Background(), program, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	cluster.untilIs(program, "it has a standby", func() bool { return program.Status.Standby == second && program.Status.Placement.Standby == second })
	cluster.dies(first)
	cluster.untilIs(program, "the standby has its part", func() bool {
		status := program.Status
		return meta.IsStatusConditionTrue(status.Conditions, operator.Protected) && status.Primary == fourth && status.Backup == second && status.Standby == first
	})
	cluster.increments(witness, service, ":5")
	// It is the standby then, and has nothing but the word.
	cluster.returns(first)
	cluster.endOf(program)
	for _, name := range cluster.hosts.Names {
		cluster.nothingIsLeft(name)
	}
}

// saysThatAProgramHasEnded: a client ends both copies, which have a root directory of their own; nobody begins the program anew, and its object can be deleted.
func (cluster *cluster) saysThatAProgramHasEnded() {
	program := cluster.sessions("ends")
	program.Spec.Program.Root, program.Spec.Program.Command[0] = cluster.root(), "/bin/redis-server"
	cluster.create(program)
	cluster.untilSaysOf(program, operator.Protected, metav1.ConditionTrue, "complete second copy")
	line := "exec 3<>/dev/tcp/" + service + "/6379 && printf 'SHUTDOWN NOSAVE\\r\\n' >&3 && cat <&3"
	// Whether the connection ends well is not what counts.
	_ = cluster.hosts.Command(program.Status.Witness, "timeout", "10", "bash", "-c", line).Run()
	cluster.untilSaysOf(program, operator.Running, metav1.ConditionFalse, "failed: the program ended with exit code 0")
	if meta.IsStatusConditionTrue(program.Status.Conditions, operator.Protected) {
		cluster.Errorf("%+v", program.Status)
	}
	cluster.endOf(program)
	for _, name := range cluster.hosts.Names {
		cluster.nothingIsLeft(name)
	}
}

// A VM and a program of one name would have Pods of one name: whichever comes later says so, and takes nothing away when it is deleted.
func TestAProgramWithAVMsNameSaysSo(t *testing.T) {
	stage := newStage(t)
	stage.servedByA()
	for name := range stage.daemons {
		stage.operator(name, stage.plane.Address())
	}
	pod := &v1.Pod{}
	testbed.Until(t, "the VM has its Pod", func() error {
		return stage.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: "shop-0"}, pod)
	})
	program := &v1alpha1.ProtectedProgram{ObjectMeta: named("shop"), Spec: v1alpha1.ProtectedProgramSpec{Program: v1alpha1.Program{
		Command: []string{"/programs/default/p"}, MemoryMiB: 64, NICs: []v1alpha1.ProgramNIC{{MAC: "52:54:00:12:34:57", Address: "10.0.0.57/24"}},
	}}}
	stage.create(program)
	const words = "Pod 'shop-0' is there already, and is somebody else's: delete it, or give the ProtectedProgram another name"
	testbed.Until(t, "the program says so", func() error {
		if err := stage.api.Get(context.Background(), client.ObjectKeyFromObject(program), program); err != nil {
			return err
		}
		if !says(program, operator.Placed, metav1.ConditionFalse, words) {
			return fmt.Errorf("%+v", program.Status)
		}
		return nil
	})
	if err := stage.api.Delete(context.Background(), program); err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "the program is gone", func() error {
		err := stage.api.Get(context.Background(), client.ObjectKeyFromObject(program), program)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("%v: %+v", err, program.Status)
	})
	// Where somebody else's Pod is gone later, nobody tells of that, and it is looked at again.
	other := &v1.Pod{ObjectMeta: named("later-0"), Spec: v1.PodSpec{SchedulerName: "nobody", Containers: []v1.Container{{Name: "c", Image: "none"}}}}
	stage.create(other)
	later := program.DeepCopy()
	later.ObjectMeta = named("later")
	stage.create(later)
	testbed.Until(t, "the other program says so", func() error {
		err := stage.api.Get(context.Background(), client.ObjectKeyFromObject(later), later)
		if err == nil && !says(later, operator.Placed, metav1.ConditionFalse, "Pod 'later-0' is there already") {
			err = fmt.Errorf("%+v", later.Status)
		}
		return err
	})
	if err := stage.api.Delete(context.Background(), other, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "it has its Pod", func() error {
		err := stage.api.Get(context.Background(), client.ObjectKeyFromObject(other), other)
		if err == nil && !metav1.IsControlledBy(other, later) {
			err = fmt.Errorf("%+v", other.ObjectMeta)
		}
		return err
	})
	now := &v1.Pod{}
	if err := stage.api.Get(context.Background(), client.ObjectKeyFromObject(pod), now); err != nil || now.UID != pod.UID || now.DeletionTimestamp != nil {
		t.Errorf("the VM's Pod: %v, %+v", err, now.ObjectMeta)
	}
}
