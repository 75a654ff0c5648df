package operator

import (
	"math/rand"
	"os/user"
	"strings"
	"testing"
	"time"

	"github.com/BurntSushi/toml"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

func shop() *v1alpha1.ProtectedVM {
	return &v1alpha1.ProtectedVM{
		ObjectMeta: metav1.ObjectMeta{Name: "shop", Namespace: "shops", UID: "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"},
		Spec:       v1alpha1.ProtectedVMSpec{Strength: 2, Policy: "dunlin", Storage: "gannet", VM: v1alpha1.VM{MemoryMiB: 64, Kernel: "/images/shops/k"}},
		Status: v1alpha1.ProtectedStatus{Placement: &v1alpha1.Placement{
			Members: []string{"a", "b"}, Witness: "c", Strength: 2, Storage: "gannet",
		}},
	}
}

func sessions() *v1alpha1.ProtectedProgram {
	return &v1alpha1.ProtectedProgram{
		ObjectMeta: metav1.ObjectMeta{Name: "sessions", Namespace: "shops", UID: "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"},
		Spec: v1alpha1.ProtectedProgramSpec{Strength: 2, Policy: "dunlin", Program: v1alpha1.Program{
			Command: []string{"/programs/shops/p"}, User: "nobody", MemoryMiB: 64, MilliCPU: 1500,
			NICs: []v1alpha1.ProgramNIC{{MAC: "52:54:00:12:34:57", Bridge: "br0", Address: "10.0.0.57/24"}},
		}},
		Status: v1alpha1.ProtectedStatus{Placement: &v1alpha1.Placement{Members: []string{"a", "b"}, Witness: "c", Strength: 2}},
	}
}

var limits = Limits{Images: "/images", Programs: "/programs", Users: []string{"nobody"}, Bridges: []string{"br0"}}

// Whatever a person writes into a string stays in it: nothing of it becomes another key of the file.
func TestAFileSaysWhatTheObjectSays(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewSource(seed))
	letters := []rune("a\"'\\\n\r\t#[]={}$\u00e9\u2028\x00\x1f\x7f ")
	for try := 0; try < 300; try++ {
		var text strings.Builder
		for length := random.Intn(12); length >= 0; length-- {
			text.WriteRune(letters[random.Intn(len(letters))])
		}
		vm := shop()
		vm.Spec.VM.Append, vm.Spec.VM.CPU = text.String(), text.String()
		vm.Spec.VM.Disks = []v1alpha1.Disk{{Path: "/images/shops/one two\"", Format: "raw"}}
		vm.Spec.VM.NICs = []v1alpha1.NIC{{MAC: "52:54:00:12:34:56", Bridge: "br0"}}
		written, err := limits.File(vm)
		if err != nil {
			t.Fatalf("%q: %v", text.String(), err)
		}
		var read file
		known, err := toml.Decode(written, &read)
		if err != nil || len(known.Undecoded()) > 0 {
			t.Fatalf("%q: %v, %v: %s", text.String(), err, known.Undecoded(), written)
		}
		if read.VM.Append != text.String() || read.VM.CPU != text.String() || read.Name != "shop.0a1b2c3d4e5f" || read.Witness != "c" || len(read.Members) != 2 ||
			read.VM.Disks[0].Path != "/images/shops/one two\"" || read.VM.NICs[0].Bridge != "br0" || read.VM.MemoryMiB != 64 {
			t.Fatalf("%q: %+v", text.String(), read)
		}

		program := sessions()
		program.Spec.Program.Command = append(program.Spec.Program.Command, text.String())
		program.Spec.Program.Directory, program.Spec.Program.Root = text.String(), "/programs/shops/one two\""
		program.Spec.Program.Environment = map[string]string{"A_WORD": text.String()}
		program.Spec.Program.Data, program.Spec.Program.DataAt, program.Spec.Program.DataMiB = "/images/shops/one two\"", text.String(), 64
		program.Spec.Program.Clock, program.Spec.Program.Chance, program.Spec.Program.Restart = "own", "agreed", "on-failure"
		if written, err = limits.File(program); err != nil {
			t.Fatalf("%q: %v", text.String(), err)
		}
		read = file{}
		known, err = toml.Decode(written, &read)
		if err != nil || len(known.Undecoded()) > 0 || read.VM != nil || read.Program == nil {
			t.Fatalf("%q: %v, %v: %s", text.String(), err, known.Undecoded(), written)
		}
		if runs := read.Program; len(runs.Command) != 2 || runs.Command[1] != text.String() || runs.Directory != text.String() || len(runs.Environment) != 1 ||
			runs.Environment["A_WORD"] != text.String() || runs.User != "nobody" || runs.MemoryMiB != 64 || runs.CPUs != 1.5 || len(runs.NICs) != 1 {
			t.Fatalf("%q: %+v", text.String(), runs)
		}
		if runs := read.Program; runs.Data != "/images/shops/one two\"" || runs.DataAt != text.String() || runs.DataMiB != 64 || runs.Clock != "own" ||
			runs.Root != "/programs/shops/one two\"" || runs.Chance != "agreed" || runs.Restart != "on-failure" {
			t.Fatalf("%q: %+v", text.String(), runs)
		}
	}
}

// A standby may be named while it runs, so that what has none says as well how long it waits, a VM or a program.
func TestAFileSaysWhenTheStandbyGetsAPart(t *testing.T) {
	for seconds, want := range map[int64]string{0: "", 7: "7s", 86400: "86400s"} {
		alone, with, program, withProgram := shop(), withStandby(), sessions(), sessions()
		alone.Spec.StandbyAfterSeconds, with.Spec.StandbyAfterSeconds = seconds, seconds
		program.Spec.StandbyAfterSeconds, withProgram.Spec.StandbyAfterSeconds = seconds, seconds
		withProgram.Status.Placement = with.Status.Placement.DeepCopy()
		for _, object := range []v1alpha1.Protected{alone, with, program, withProgram} {
			written, err := limits.File(object)
			var read file
			if _, wrong := toml.Decode(written, &read); err != nil || wrong != nil || read.StandbyAfter != want || read.Standby != object.Seen().Placement.Standby {
				t.Errorf("%d s: %v, %v: %s", seconds, err, wrong, written)
			}
		}
	}
}

func TestAFileSaysHowOftenTheStandbyGetsACheckpoint(t *testing.T) {
	for seconds, want := range map[int64]string{0: "", 30: "30s"} {
		vm := shop()
		vm.Spec.StandbyCheckpointSeconds = seconds
		written, err := limits.File(vm)
		var read file
		if _, wrong := toml.Decode(written, &read); err != nil || wrong != nil || read.StandbyCheckpoint != want {
			t.Errorf("%d s: %v, %v: %s", seconds, err, wrong, written)
		}
	}
}

// A daemon refuses a number that is nothing, and knows what happens where there is none.
func TestAFileSaysNothingOfWhatIsLeftOut(t *testing.T) {
	for _, object := range []v1alpha1.Protected{sessions(), shop()} {
		written, err := limits.File(object)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(written, "\n") {
			key, value, _ := strings.Cut(strings.TrimSpace(line), " = ")
			if value == "0" || value == "0.0" || value == `""` || value == "[]" {
				t.Errorf("%s has %s = %s", object.GetName(), key, value)
			}
		}
	}
}

func TestANamespaceHasItsOwnExecutables(t *testing.T) {
	for path, may := range map[string]bool{
		"/programs/shops/p": true, "/programs/shops/more/p": true, "/programs/shops": false, "/programs/shops/": false, "/programs/others/p": false,
		"/programs/shops/../others/p": false, "/programs/shops/./p": false, "/programs/shops-of-others/p": false, "/bin/sh": false, "p": false, "": false,
	} {
		program := sessions()
		program.Spec.Program.Command = []string{path, "/programs/shops/p"}
		if _, err := limits.File(program); (err == nil) != may {
			t.Errorf("%s: allowed is %v; it said: %v", path, may, err)
		}
	}
	none := sessions()
	none.Spec.Program.Command = nil
	if _, err := limits.File(none); err == nil {
		t.Error("a program without a command is allowed")
	}
}

// What is in a root directory of the namespace's is the namespace's, by whatever path the program knows it.
func TestANamespaceHasItsOwnRoots(t *testing.T) {
	for _, one := range []struct {
		root, executable string
		may              bool
	}{
		{"", "/bin/sh", false}, {"/", "/bin/sh", false}, {"", "/programs/shops/p", true}, {"/", "/programs/shops/p", true},
		{"/programs/shops/redis", "/bin/sh", true}, {"/programs/shops/redis", "/programs/shops/p", true}, {"/programs/others/redis", "/bin/sh", false},
		{"/programs/shops/", "/bin/sh", false}, {"/programs/shops/../others", "/bin/sh", false}, {"/srv", "/bin/sh", false}, {"//", "/bin/sh", false},
		{"/.", "/programs/shops/p", false}, {"/srv", "/programs/shops/p", false}, {"srv", "/bin/sh", false},
	} {
		program := sessions()
		program.Spec.Program.Root, program.Spec.Program.Command = one.root, []string{one.executable}
		if _, err := limits.File(program); (err == nil) != one.may {
			t.Errorf("'%s' in '%s': allowed is %v; it said: %v", one.executable, one.root, one.may, err)
		}
	}
	none := sessions()
	none.Spec.Program.Root, none.Spec.Program.Command = "/programs/shops/redis", nil
	if _, err := limits.File(none); err == nil {
		t.Error("a program without a command is allowed")
	}
}

// No program runs as root, or as anybody else, whom the administrator has not named.
func TestAProgramRunsAsWhomTheAdministratorNamed(t *testing.T) {
	for _, one := range []struct {
		user  string
		users []string
		says  string
	}{
		{"nobody", []string{"nobody"}, ""}, {"root", []string{"nobody", "root"}, ""}, {"root", []string{"nobody"}, "may not run as user 'root'"},
		{"root", nil, "its operator lets programs run as none"}, {"daemon", []string{"nobody"}, "may not run as user 'daemon'"},
		{"", []string{"nobody"}, "may not run as user ''"}, {"0", []string{"nobody"}, "may not run as user '0'"},
		{"no-such-user", []string{"no-such-user"}, "user 'no-such-user' is not on this host"},
	} {
		program, limits := sessions(), limits
		program.Spec.Program.User, limits.Users = one.user, one.users
		_, err := limits.File(program)
		if (err == nil) != (one.says == "") || err != nil && !strings.Contains(err.Error(), one.says) {
			t.Errorf("'%s' of %v: %v, not '%s'", one.user, one.users, err, one.says)
		}
	}
	if err := mayBe(&user.User{Username: "toor", Uid: "0"}, []string{"toor"}); err == nil {
		t.Error("root runs a program by another name")
	}
}

func TestAProgramsDataLieAmongItsNamespacesImages(t *testing.T) {
	for path, may := range map[string]bool{
		"": true, "/images/shops/s.img": true, "/images/others/s.img": false, "/images/shops/../others/s.img": false, "/etc/shadow": false, "s.img": false,
	} {
		program := sessions()
		program.Spec.Program.Data, program.Spec.Program.DataAt = path, "/var/lib/redis"
		if _, err := limits.File(program); (err == nil) != may {
			t.Errorf("%q: %v", path, err)
		}
	}
}

func TestANamespaceHasItsOwnImages(t *testing.T) {
	for path, may := range map[string]bool{
		"/images/shops/k": true, "/images/shops/more/k": true, "/images/shops": false, "/images/shops/": false, "/images/others/k": false, "/images/k": false,
		"/images/shops/../others/k": false, "/images/shops/./k": false, "/images/shops-of-others/k": false, "/dev/sda": false, "//images/shops/k": false,
	} {
		kernel, initrd, disk := shop(), shop(), shop()
		kernel.Spec.VM.Kernel, initrd.Spec.VM.Initrd, disk.Spec.VM.Disks = path, path, []v1alpha1.Disk{{Path: path}}
		for _, vm := range []*v1alpha1.ProtectedVM{kernel, initrd, disk} {
			if _, err := limits.File(vm); (err == nil) != may {
				t.Errorf("%s: allowed is %v; it said: %v", path, may, err)
			}
		}
	}
}

func TestNamesFitAndTellObjectsApart(t *testing.T) {
	long := shop()
	long.Name = strings.Repeat("x", 48)
	if name := NameOnHosts(long); len(name) > 64 {
		t.Errorf("%s has %d characters", name, len(name))
	}
	anew := shop()
	anew.UID = types.UID("ffffffff-4e5f-6071-8293-a4b5c6d7e8f9")
	if NameOnHosts(anew) == NameOnHosts(shop()) {
		t.Error("an object that is made again is taken for the one before")
	}
}

// A deleted object goes when nobody can serve its VM any more, and no host that is heard has any of it.
func TestADeletedObjectWaitsForAMajority(t *testing.T) {
	for _, one := range []struct {
		gone, heard, says string
	}{
		{"", "abc", "is being ended on host 'a' and 'b' and 'c'"}, {"ab", "abc", "is being ended on host 'c'"}, {"abc", "abc", ""}, {"ab", "ab", ""}, {"bc", "bc", ""},
		{"a", "a", "'b' and 'c' cannot be asked"}, {"", "", "cannot be asked"}, {"abc", "", ""}, {"a", "ab", "is being ended on host 'b'"},
	} {
		vm, hosts := shop(), map[string]*v1alpha1.DunlinHost{}
		for _, name := range vm.Status.Placement.Hosts() {
			host := &v1alpha1.DunlinHost{}
			set(&host.Status.Conditions, 1, Ready, truth(strings.Contains(one.heard, name)), "Test", "")
			if hosts[name] = host; strings.Contains(one.gone, name) {
				vm.Status.Gone = append(vm.Status.Gone, name)
			}
		}
		if said := holdUp(vm, hosts); (said == "") != (one.says == "") || !strings.Contains(said, one.says) {
			t.Errorf("gone '%s', heard '%s': '%s', not '%s'", one.gone, one.heard, said, one.says)
		}
	}
	alone := shop()
	alone.Status.Placement = &v1alpha1.Placement{Members: []string{"a"}, Strength: 1}
	if holdUp(alone, nil) == "" {
		t.Error("the only host has it still, and is not heard")
	}
}

// What a host that was away has of a VM that has ended meanwhile is forgotten when all others have said that they have nothing, those too that its daemon knows, and
// not before.
func TestWhatIsLeftBehindIsForgotten(t *testing.T) {
	for _, one := range []struct {
		gone, peers, leader, standby string
		moving                       *v1alpha1.Moving
		is                           bool
	}{
		{gone: "bc", peers: "bc", is: true},
		{gone: "bc", peers: "bd"}, {gone: "bcd", peers: "bd", is: true},
		{gone: "b", peers: "bc"}, {gone: "", peers: "bc"},
		{gone: "bc", peers: "bc", leader: "a"}, {gone: "bc", peers: "bc", leader: "b"},
		{gone: "bc", peers: "bc", standby: "d"}, {gone: "bcd", peers: "bc", standby: "d", is: true},
		{gone: "bc", peers: "bc", standby: "a", is: true},
		{gone: "bcd", peers: "bc", moving: &v1alpha1.Moving{Part: "backup", From: "b", To: "d"}},
	} {
		vm, here := shop(), control.VM{Name: "shop", Role: "none", Leader: one.leader}
		vm.Status.Placement.Standby, vm.Status.Moving = one.standby, one.moving
		for _, name := range strings.Split(one.gone, "") {
			vm.Status.Gone = append(vm.Status.Gone, name)
		}
		for _, name := range strings.Split(one.peers, "") {
			here.Peers = append(here.Peers, control.Peer{Host: name})
		}
		if is := isLeftBehind(vm, here, "a"); is != one.is {
			t.Errorf("%+v: %v", one, is)
		}
	}
}

func TestReasonsAreSpeltAsKubernetesDoes(t *testing.T) {
	for word, want := range map[string]string{"took-over": "TookOver", "protected": "Protected", "quorum-lost": "QuorumLost", "": "Unknown", "stalled": "Stalled"} {
		if got := reason(word); got != want {
			t.Errorf("%s is %s", word, got)
		}
	}
}
