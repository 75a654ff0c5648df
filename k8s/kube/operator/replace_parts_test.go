package operator

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// writable is a cluster that takes every word.
type writable struct{ empty }

func (writable) Status() client.SubResourceWriter { return written{} }

// withoutStandby is a VM on a and b that was to have a standby, where c is the witness, and its third Pod's node.
func withoutStandby() *v1alpha1.ProtectedVM {
	vm := shop()
	vm.Spec.Strength, vm.Status.Placement.Strength, vm.Status.Primary = 3, 3, "a"
	return vm
}

// A third Pod that stands for the witness goes to a host without a part when there is one, and that host is the standby. Whatever part lacks a host has the first choice.
func TestAWitnessIsNoStandbyWhereAnotherHostIsFree(t *testing.T) {
	for _, one := range []struct {
		away        map[string]string
		free, heard string
		pods        string
		wishes      string
		grows       bool
		moves       string
		says        string
	}{
		{nil, "", "abc", "abc", "a b c", false, "", ""},
		{nil, "de", "abcde", "abc", "a b de", false, "", ""},
		{nil, "d", "abcd", "ab-", "a b d", false, "", ""},
		{nil, "d", "abcd", "abd", "a b d", true, "", ""},
		// It is not heard any more.
		{nil, "", "abc", "abd", "a b c", false, "", "Pod 'shop-2' does not stand on node 'c' for the witness there"},
		// The daemons would not name it while one of the group is silent, and may need the host for that one's part soon.
		{nil, "d", "acd", "abd", "a b d", false, "", ""},
		{map[string]string{"b": Lost}, "d", "acd", "abd", "a d c", false, "", "copy 1 goes to another host as soon as it can"},
		{map[string]string{"c": Lost}, "d", "abd", "abd", "a b d", false, "witness c d", "the witness goes to another host as soon as it can"},
	} {
		vm, events := withoutStandby(), record.NewFakeRecorder(10)
		placer := &placer{Client: writable{}, events: events}
		seen, pods := view{away: one.away, hosts: heard(one.heard)}, standing(one.pods)
		if one.free != "" {
			seen.free = strings.Split(one.free, "")
		}
		var wishes []string
		for range pods {
			wishes = append(wishes, strings.Join(seen.wish(vm, len(wishes)), ""))
		}
		_, all := seen.explain(vm, pods)
		moves := ""
		if next := placer.next(context.Background(), vm, pods, seen); next != nil {
			moves = strings.Join([]string{next.Part, next.From, next.To}, " ")
		}
		grows, err := placer.grow(context.Background(), vm, pods, seen)
		if strings.Join(wishes, " ") != one.wishes || grows != one.grows || err != nil || moves != one.moves || !strings.Contains(sentences(all), one.says) || (len(all) > 0) != (one.says != "") {
			t.Errorf("%v away, %s free, Pods on %s: Pods ask for %v, '%s', it grows: %v, %v, %q", one.away, one.free, one.pods, wishes, moves, grows, err, all)
		}
		if placement := vm.Status.Placement; grows && (placement.Standby != "d" || strings.Join(placement.Copies, "") != "abd" || placement.Strength != 3 || placement.Witness != "c") {
			t.Errorf("%+v", placement)
		}
	}
	// Copies have moved since it had one.
	vm := withStandby()
	vm.Status.Placement.Standby, vm.Status.Placement.Copies, vm.Status.Placement.Members, vm.Status.Primary = "", []string{"a", "c", "b"}, []string{"a", "b"}, "a"
	placer := &placer{Client: writable{}, events: record.NewFakeRecorder(10)}
	seen := view{hosts: heard("abde"), free: []string{"e"}}
	if wish := seen.wish(vm, 1); strings.Join(wish, "") != "e" {
		t.Errorf("Pod 1 asks for %v", wish)
	}
	if grows, err := placer.grow(context.Background(), vm, standing("aeb"), seen); !grows || err != nil || strings.Join(vm.Status.Placement.Copies, "") != "aeb" {
		t.Errorf("%v, %v: %+v", grows, err, vm.Status.Placement)
	}
	for _, not := range []func(*v1alpha1.ProtectedVM){
		func(vm *v1alpha1.ProtectedVM) { vm.Spec.Strength = 2 }, func(vm *v1alpha1.ProtectedVM) { vm.Status.Primary = "" },
		func(vm *v1alpha1.ProtectedVM) {
			vm.Status.Moving = &v1alpha1.Moving{Part: PartWitness, From: "c", To: "e"}
		},
	} {
		vm := withoutStandby()
		not(vm)
		if grows, _ := placer.grow(context.Background(), vm, standing("abe"), view{hosts: heard("abce"), free: []string{"e"}}); grows {
			t.Errorf("it grows: %+v", vm)
		}
	}
}

// With two copies that are to get a standby, and a third Pod for it, a copy that lacks a host comes first: its Pod and that one may not be on one node.
func TestALostCopyComesBeforeAStandbyThatIsNotThereYet(t *testing.T) {
	vm := shop()
	vm.Spec.Strength, vm.Status.Primary = 3, "a"
	placer := &placer{patience: &patience{after: time.Hour, since: map[string]time.Time{}}}
	for away, want := range map[string]string{"": "d", "b": "c"} {
		seen := view{away: map[string]string{}, hosts: heard("abcd"), free: []string{"d"}}
		if away != "" {
			seen.away[away] = Lost
		}
		wish := seen.wish(vm, 2)
		if strings.Join(wish, "") != want || placer.fits(vm, 2, standing("abd")[2], wish, seen) != (away == "") {
			t.Errorf("'%s' is away: Pod 2 asks for %v", away, wish)
		}
	}
	// It waits where no host is free, and is not made.
	if wish := (view{hosts: heard("abc")}).wish(vm, 2); wish != nil {
		t.Errorf("Pod 2 asks for %v", wish)
	}
}

// A standby that is written and that the daemons do not know of gets a lost host's part by an order.
func TestAStandbyThatDaemonsDoNotKnowIsToldToTakeAPart(t *testing.T) {
	for known, want := range map[string]bool{"c": false, "": true, "e": true} {
		vm := withStandby()
		vm.Status.Primary, vm.Status.Standby = "a", known
		next := (&placer{Client: empty{}}).next(context.Background(), vm, standing("abc"), view{away: map[string]string{"b": Lost}, hosts: heard("acd")})
		if (next != nil) != want || want && next.To != "c" {
			t.Errorf("the daemons' standby is '%s': %+v", known, next)
		}
	}
}

// What the daemons say decides what becomes of another standby's order.
func TestAnotherStandbyIsWhatTheDaemonsSay(t *testing.T) {
	for _, one := range []struct {
		leads, copies, says string
		stays               bool
		moving              bool
		want                string
	}{
		{"a", "b", "c", false, true, "ab d c abc"}, {"a", "b", "", false, true, "ab d c abc"}, {"a", "b", "c", true, false, "ab d c abc"},
		{"a", "b", "e", false, false, "ab d e abe"}, {"a", "b", "e", true, false, "ab d e abe"}, {"a", "b", "f", false, false, "ab d f abf"},
		// The old one, or the new one, has got a part meanwhile.
		{"a", "c", "b", false, false, "ac d b abc"}, {"c", "a", "b", false, false, "ac d b abc"}, {"a", "e", "b", false, false, "ae d b abe"},
		// So it is where the daemons of an older group name none.
		{"a", "c", "", false, false, "ac d b abc"}, {"a", "e", "", false, false, "ae d c aec"},
		// One has left, and nobody has come.
		{"a", "", "c", false, true, "ab d c abc"},
	} {
		here := control.VM{Standby: one.says, Peers: []control.Peer{{Host: "d", Witness: true}}}
		for _, name := range strings.Fields(one.copies) {
			here.Peers = append(here.Peers, control.Peer{Host: name})
		}
		status := withStandby().Status
		status.Moving, status.Gone = &v1alpha1.Moving{Part: PartStandby, From: "c", To: "e", Why: Lost}, []string{"e"}
		(&host{name: one.leads}).followGroup(here, one.stays, &status)
		now := status.Placement
		got := strings.Join([]string{strings.Join(now.Members, ""), now.Witness, now.Standby, strings.Join(now.Copies, "")}, " ")
		if got != one.want || (status.Moving != nil) != one.moving || now.Standby == "e" && len(status.Gone) > 0 {
			t.Errorf("%+v: %s, %+v, %v", one, got, status.Moving, status.Gone)
		}
	}
}

// An order for another standby that comes to nothing does not hold up a part that lacks a host.
func TestAnOrderForAStandbyGivesWayToAPart(t *testing.T) {
	for _, one := range []struct {
		part string
		away map[string]string
		void string
	}{
		{PartStandby, map[string]string{"c": Lost}, ""}, {PartStandby, map[string]string{"c": Lost, "b": Drained}, "its part comes first"},
		{PartStandby, map[string]string{"c": Lost, "d": Lost}, "its part comes first"}, {PartStandby, map[string]string{"c": Lost, "e": Lost}, "host e is lost"},
		{PartBackup, map[string]string{"b": Lost, "d": Lost}, ""}, {PartBackup, map[string]string{"b": Lost, "e": Deleted}, "host e is lost"},
	} {
		vm, events := withStandby(), record.NewFakeRecorder(10)
		vm.Status.Primary, vm.Status.Moving = "a", &v1alpha1.Moving{Part: one.part, From: "c", To: "e", Why: Lost}
		placer := &placer{Client: writable{}, events: events}
		wrote, err := placer.move(context.Background(), vm, standing("abe"), view{away: one.away, hosts: heard("abde")})
		if wrote != (one.void != "") || (vm.Status.Moving == nil) != wrote || err != nil {
			t.Errorf("%+v: %v, %v, %+v", one, wrote, err, vm.Status.Moving)
		}
		if wrote {
			if said := <-events.Events; !strings.Contains(said, one.void) {
				t.Errorf("%+v: %s", one, said)
			}
		}
	}
}

// listed is a cluster with these hosts, in which every node is this one.
type listed struct {
	client.Client
	hosts map[string]*v1alpha1.DunlinHost
	node  v1.Node
}

func (listed listed) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	for name, host := range listed.hosts {
		host.Name = name
		list.(*v1alpha1.DunlinHostList).Items = append(list.(*v1alpha1.DunlinHostList).Items, *host)
	}
	return nil
}

func (listed listed) Get(_ context.Context, _ client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	if node, is := object.(*v1.Node); is {
		listed.node.DeepCopyInto(node)
	}
	return nil
}

// The standby stays what it is when it is there again, when the new one is silent, when none is asked for, and when one of the group is silent.
func TestAStandbyThatIsBackStaysTheStandby(t *testing.T) {
	for _, one := range []struct {
		heard, why string
		cordoned   bool
		strength   int
		stays      bool
	}{
		{"abde", Lost, false, 3, false}, {"abcde", Lost, false, 3, true}, {"abd", Lost, false, 3, true}, {"abde", Lost, false, 2, true}, {"abde", Lost, false, 1, true},
		{"ade", Lost, false, 3, true}, {"abe", Lost, false, 3, true}, {"abcde", Drained, true, 3, false}, {"abcde", Drained, false, 3, true},
	} {
		vm := withStandby()
		vm.Spec.Strength = one.strength
		vm.Status.Moving = &v1alpha1.Moving{Part: PartStandby, From: "c", To: "e", Why: one.why}
		there := listed{hosts: heard(one.heard)}
		there.node.Spec.Unschedulable = one.cordoned
		here := control.VM{Standby: "c", Peers: []control.Peer{{Host: "b"}, {Host: "d", Witness: true}}}
		if stays := (&host{Client: there, name: "a"}).stays(context.Background(), vm, here); stays != one.stays {
			t.Errorf("%+v: it stays: %v", one, stays)
		}
	}
}

// With one copy, or two, another standby is not looked for; and the third Pod of a VM that has none goes when two copies are asked for.
func TestNoStandbyIsLookedForThatIsNotAsked(t *testing.T) {
	vm := withStandby()
	vm.Spec.Strength, vm.Status.Primary = 2, "a"
	seen := view{away: map[string]string{"c": Lost}, hosts: heard("abde"), free: []string{"e"}}
	if wish := seen.wish(vm, 2); strings.Join(wish, "") != "c" {
		t.Errorf("Pod 2 asks for %v", wish)
	}
	if _, all := seen.explain(vm, standing("abc")); !slices.Equal(all, []string{"host 'c' is lost: nothing is heard of it: it stays the standby, since none is asked for"}) {
		t.Errorf("%q", all)
	}
	for known, strength := range map[string]int{"": 2, "c": 3} {
		vm := withoutStandby()
		shrink(2, control.VM{Standby: known}, &vm.Status)
		if vm.Status.Placement.Strength != strength {
			t.Errorf("the daemons' standby is '%s': %+v", known, vm.Status.Placement)
		}
	}
	alone := shop()
	alone.Status.Placement = &v1alpha1.Placement{Members: []string{"a"}, Strength: 1}
	if shrink(2, control.VM{}, &alone.Status); alone.Status.Placement.Strength != 1 {
		t.Errorf("%+v", alone.Status.Placement)
	}
}

// While another standby is being named both may have got a part that nobody has told of.
func TestADeletedObjectWaitsForBothStandbys(t *testing.T) {
	for _, one := range []struct{ gone, heard, says string }{
		{"abcde", "abcde", ""}, {"abde", "abcde", "is being ended on host 'c'"}, {"abcd", "abcde", "is being ended on host 'e'"}, {"abde", "abde", ""},
		// One after the other may have got a part, so that the group is of both.
		{"abd", "abd", "host 'c' and 'e' cannot be asked to end the VM, and could serve it still"},
		// What the new one said before it was silent does not count.
		{"ade", "ad", "host 'b' and 'c' and 'e' cannot be asked to end the VM, and could serve it still"}, {"bd", "bd", "could serve it still"}, {"ab", "ab", "could serve it still"},
		{"a", "a", "without a majority"},
	} {
		vm := withStandby()
		vm.Status.Moving = &v1alpha1.Moving{Part: PartStandby, From: "c", To: "e", Why: Lost}
		vm.Status.Gone = strings.Split(one.gone, "")
		if said := holdUp(vm, heard(one.heard)); (said == "") != (one.says == "") || !strings.Contains(said, one.says) {
			t.Errorf("gone '%s', heard '%s': '%s', not '%s'", one.gone, one.heard, said, one.says)
		}
	}
	vm := withStandby()
	vm.Status.Moving = &v1alpha1.Moving{Part: PartStandby, From: "c", To: "e", Why: Lost}
	if got := fmt.Sprint(vm.Status.Standbys(), vm.Status.Hosts()); got != "[c e] [a b c d e]" {
		t.Errorf("its standbys and hosts are %s", got)
	}
}
