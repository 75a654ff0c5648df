package operator

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// unlike are hosts that are heard: those of names in capitals have KVM. The names are small.
func unlike(names string) map[string]*v1alpha1.DunlinHost {
	hosts := map[string]*v1alpha1.DunlinHost{}
	for _, letter := range strings.Split(names, "") {
		name := strings.ToLower(letter)
		hosts[name] = &v1alpha1.DunlinHost{}
		hosts[name].Name, hosts[name].Status.KVM = name, letter != name
		set(&hosts[name].Status.Conditions, 1, Ready, truth(true), "Test", "")
	}
	return hosts
}

func TestACopyNeedsWhatItsObjectSays(t *testing.T) {
	for _, one := range []struct{ accel, hosts, primary, want string }{
		{"", "aB", "", "alike"}, {"auto", "aB", "", "alike"}, {"auto", "aB", "b", "needed"}, {"auto", "aB", "a", "none"}, {"auto", "aB", "z", "alike"},
		{"kvm", "aB", "a", "needed"}, {"kvm", "aB", "", "needed"}, {"tcg", "aB", "b", ""},
	} {
		vm := shop()
		vm.Spec.VM.Accel, vm.Status.Primary = one.accel, one.primary
		if needs := needsOf(vm, unlike(one.hosts)); needs != (v1alpha1.Needs{KVM: one.want}) {
			t.Errorf("%+v: %+v", one, needs)
		}
	}
	program := sessions()
	program.Spec.Program.Data, program.Spec.Program.DataMiB = "/images/default/data", 512
	if needs := needsOf(program, nil); needs != (v1alpha1.Needs{Data: "/images/default/data", DataMiB: 512}) {
		t.Errorf("%+v", needs)
	}
	// A Pod for a copy that is there asks for its room alone.
	vm := shop()
	if needs := needsAt(vm, 1, []string{"b"}, nil); needs != nil {
		t.Errorf("%+v", needs)
	}
	if needs := needsAt(vm, 1, []string{"d", "e"}, nil); needs == nil || needs.KVM != v1alpha1.KVMAlike {
		t.Errorf("%+v", needs)
	}
	vm.Status.Placement = nil
	made := pod(vm, 1, 2, nil, needsAt(vm, 1, nil, nil), "")
	if needs, said := v1alpha1.ReadNeeds(made.Annotations); !said || needs.KVM != v1alpha1.KVMAlike {
		t.Errorf("%+v", made.Annotations)
	}
}

func TestAHostLacksWhatACopyNeeds(t *testing.T) {
	host, no := unlike("a")["a"], false
	silent, closed := unlike("B")["b"], unlike("C")["c"]
	set(&silent.Status.Conditions, 1, Ready, "Unknown", "Test", "")
	closed.Spec.Copies = &no
	data := v1alpha1.Needs{Data: "/d", DataMiB: 100}
	full, room, has := unlike("a")["a"], unlike("a")["a"], unlike("a")["a"]
	full.Status.DiskFreeMiB, room.Status.DiskFreeMiB, has.Status.Data = 99, 100, []string{"/c", "/d"}
	for _, one := range []struct {
		needs v1alpha1.Needs
		host  *v1alpha1.DunlinHost
		lacks string
	}{
		{v1alpha1.Needs{}, nil, "it has no DunlinHost"}, {v1alpha1.Needs{}, host, ""}, {v1alpha1.Needs{}, silent, "no daemon of Dunlin's is heard there"},
		{v1alpha1.Needs{}, closed, "its DunlinHost takes no copies"}, {v1alpha1.Needs{KVM: "needed"}, host, "it has no KVM"},
		{v1alpha1.Needs{KVM: "none"}, unlike("A")["a"], "it has KVM, and the copies run without"}, {v1alpha1.Needs{KVM: "none"}, host, ""},
		{v1alpha1.Needs{KVM: "alike"}, host, ""}, {data, full, "less than 100 MiB are free where images lie"}, {data, room, ""}, {data, has, ""},
	} {
		if lacks := one.needs.Lacks(one.host); lacks != one.lacks {
			t.Errorf("%+v of %+v: '%s'", one.needs, one.host, lacks)
		}
	}
	for _, one := range []struct {
		hosts  string
		copies int
		lack   string
	}{
		{"ABcd", 2, "cd"}, {"abCd", 2, "c"}, {"AbC", 3, "abc"}, {"Ab", 1, ""}, {"abc", 3, ""}, {"ABCd", 3, "d"}, {"Abcd", 4, "abcd"},
	} {
		lack, got := (v1alpha1.Needs{KVM: "alike"}).Lack(unlike(one.hosts), strings.Split(strings.ToLower(one.hosts), ""), one.copies), ""
		for _, name := range strings.Split(strings.ToLower(one.hosts), "") {
			if lack[name] != "" {
				got += name
			}
		}
		if got != one.lack {
			t.Errorf("%+v: %v", one, lack)
		}
	}
}

// An object that waits for nodes says which hosts could not have a copy, where too few could.
func TestWhoWaitsForNodesSaysWhatHostsLack(t *testing.T) {
	vm := shop()
	vm.Status.Placement, vm.Spec.VM.Accel = nil, "kvm"
	pods := map[int]*v1.Pod{0: {}, 1: {}}
	pods[0].Name, pods[1].Name = "shop-0", "shop-1"
	for hosts, want := range map[string]string{
		"Abc": "; 1 of 3 hosts could have a copy, and it takes 2: host 'b': it has no KVM, host 'c': it has no KVM", "ABc": "",
		"abcdefG": "host 'e': it has no KVM, and 1 more",
	} {
		_, why := (&placer{Client: empty{}}).choose(context.Background(), vm, pods, unlike(hosts))
		if !strings.HasPrefix(why, "no node yet for Pod 'shop-0', 'shop-1': 'kubectl describe pod' says why") || !strings.HasSuffix(why, want) || want == "" && strings.Contains(why, ";") {
			t.Errorf("%s: '%s'", hosts, why)
		}
	}
}

// A lost copy goes to a host that can have it. One that cannot may be the witness, and one that has refused lately is asked where there is no other.
func TestCandidatesCouldHaveACopy(t *testing.T) {
	vm := shop()
	vm.Status.Primary = "a"
	placer := &placer{Client: empty{}, refusals: newRefusals()}
	look := func() candidates {
		found, err := placer.candidates(context.Background(), vm, unlike("AbcdEFG"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := look(); strings.Join(found.free, "") != "efg" || strings.Join(found.others, "") != "d" || !reflect.DeepEqual(found.lacks, map[string]string{"d": "it has no KVM"}) {
		t.Errorf("%+v", found)
	}
	placer.refusals.note(vm, "e")
	placer.refusals.note(vm, "f")
	if found := look(); strings.Join(found.free, "") != "g" || strings.Join(found.others, "") != "d" {
		t.Errorf("%+v", found)
	}
	placer.refusals.note(vm, "g")
	if found := look(); strings.Join(found.free, "") != "efg" || strings.Join(found.others, "") != "d" {
		t.Errorf("%+v", found)
	}
	// It is asked again after a while, and what is gone is forgotten.
	placer.refusals.since[refusalOf(vm, "e")] = time.Now().Add(-refusedFor)
	if found := look(); strings.Join(found.free, "") != "e" || len(placer.refusals.since) != 2 {
		t.Errorf("%+v: %+v", found, placer.refusals.since)
	}
	if soonest := placer.refusals.soonest(vm, unlike("efg")); soonest <= 0 || soonest > refusedFor {
		t.Error(soonest)
	}
	placer.refusals.forget(vm)
	if len(placer.refusals.since) != 0 {
		t.Error(placer.refusals.since)
	}
	seen := view{away: map[string]string{"b": Lost}, lacks: map[string]string{"d": "it has no KVM"}, others: []string{"d"}}
	reason, all := seen.explain(vm, map[int]*v1.Pod{0: standing("ab")[0], 1: standing("ab")[1]})
	if said := sentences(all); reason != "NoOtherNode" || !strings.HasPrefix(said, "host 'b' is lost: nothing is heard of it: copy 1 stays there, since no other host is heard that has no part in the VM and could have one: host 'd': it has no KVM") {
		t.Errorf("%s: %s", reason, said)
	}
	seen.away = map[string]string{"c": Lost}
	if next := placer.next(context.Background(), vm, standing("ab"), seen); next == nil || next.Part != PartWitness || next.To != "d" {
		t.Errorf("the witness goes to %+v", next)
	}
}

// Data that are there are said, as far as a namespace may have them.
func TestAHostSaysWhichDataAreThere(t *testing.T) {
	images := t.TempDir()
	if err := os.Mkdir(filepath.Join(images, "shops"), 0o700); err != nil {
		t.Fatal(err)
	}
	var all []v1alpha1.Protected
	for _, data := range []string{"", images + "/shops/one", images + "/shops/two", images + "/other", "/etc/passwd"} {
		program := sessions()
		program.Spec.Program.Data = data
		all = append(all, program, program)
	}
	for _, name := range []string{"shops/one", "other"} {
		if err := os.WriteFile(filepath.Join(images, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if there := dataThere(all, images); !reflect.DeepEqual(there, []string{images + "/shops/one"}) {
		t.Error(there)
	}
}

// A part is taken back from a host that refuses it only where another host could have it, and nothing of it has happened; a standby that daemons do not know of counts
// as away.
func TestARefusalIsHeeded(t *testing.T) {
	for _, one := range []struct {
		moving                *v1alpha1.Moving
		refuses, known, hosts string
		takenBack             bool
		away                  string
	}{
		{&v1alpha1.Moving{Part: PartStandby, From: "c", To: "e", Why: Lost}, "e", "c", "abdef", true, ""},
		{&v1alpha1.Moving{Part: PartStandby, From: "c", To: "e", Why: Lost}, "e", "c", "abde", false, ""},
		{&v1alpha1.Moving{Part: PartStandby, From: "c", To: "f", Why: Lost}, "e", "c", "abdef", false, ""},
		{&v1alpha1.Moving{Part: PartBackup, From: "b", To: "e", Why: Lost}, "e", "c", "abdef", true, ""},
		// What goes to the standby is the daemons' business, and they have said why.
		{&v1alpha1.Moving{Part: PartBackup, From: "b", To: "c", Why: Drained}, "c", "c", "acdef", false, ""},
		{nil, "c", "", "abcdef", false, Refused}, {nil, "c", "", "abcd", false, ""}, {nil, "c", "c", "abcdef", false, ""},
	} {
		vm := withStandby()
		vm.Status.Primary, vm.Status.Standby, vm.Status.Moving = "a", one.known, one.moving
		vm.Status.Refusal = &v1alpha1.Refusal{Host: one.refuses, Why: "it has no image"}
		events := record.NewFakeRecorder(10)
		placer := &placer{Client: writable{}, events: events, refusals: newRefusals()}
		seen := view{hosts: unlike(one.hosts), away: map[string]string{}}
		found, err := placer.candidates(context.Background(), vm, seen.hosts)
		seen.take(found)
		if err != nil {
			t.Fatal(err)
		}
		changed, err := placer.heed(context.Background(), vm, &seen)
		if err != nil || changed != one.takenBack || (vm.Status.Moving == nil) != (one.takenBack || one.moving == nil) || seen.away[one.refuses] != one.away {
			t.Errorf("%+v: %v %v %+v, away %v", one, changed, err, vm.Status.Moving, seen.away)
		}
		if one.takenBack {
			if event := <-events.Events; !strings.Contains(event, "host e refuses the place as standby that host c had") && !strings.Contains(event, "host e refuses the copy that host b had") {
				t.Error(event)
			}
		}
	}
}

// The operator beside the daemon says who refuses after the third time in a row, as long as that one is to have the part and the old one has it.
func TestARefusalIsSaidAfterAWhile(t *testing.T) {
	no := &control.Refused{Why: "it has no image"}
	host := &host{name: "a"}
	vm := withStandby()
	here := control.VM{Name: "v", Role: "primary", Standby: "c", Peers: []control.Peer{{Host: "b"}, {Host: "d", Witness: true}}}
	says := func() *v1alpha1.Refusal {
		status := vm.Status.DeepCopy()
		host.tellRefusal(vm, here, status)
		return status.Refusal
	}
	vm.Status.Moving = &v1alpha1.Moving{Part: PartBackup, From: "b", To: "e", Why: Lost}
	for time := 1; time <= 3; time++ {
		if said := says(); said != nil {
			t.Errorf("before the %d. time it says %+v", time, said)
		}
		host.counts("v", "e", no)
	}
	if said := says(); said == nil || *said != (v1alpha1.Refusal{Host: "e", Why: "it has no image"}) {
		t.Errorf("%+v", said)
	}
	here.Peers = here.Peers[1:]
	if said := says(); said != nil {
		t.Errorf("the old host has left the group, and it says %+v", said)
	}
	vm.Status.Moving = &v1alpha1.Moving{Part: PartStandby, From: "c", To: "f", Why: Lost}
	if said := says(); said != nil {
		t.Errorf("another host is to have it, and it says %+v", said)
	}
	vm.Status.Moving, here.Standby = nil, ""
	host.counts("v", "c", no)
	host.counts("v", "c", no)
	if said := says(); said != nil {
		t.Errorf("%+v", said)
	}
	host.counts("v", "c", no)
	if said := says(); said == nil || said.Host != "c" {
		t.Errorf("%+v", said)
	}
	// No answer is no refusal, and begins anew.
	host.counts("v", "c", context.DeadlineExceeded)
	if said := says(); said != nil || len(host.refusals) != 0 {
		t.Errorf("%+v", said)
	}
}
