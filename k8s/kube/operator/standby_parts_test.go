package operator

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// withStandby is a VM on a and b, with c as its standby and d as its witness.
func withStandby() *v1alpha1.ProtectedVM {
	vm := shop()
	vm.Spec.Strength = 3
	vm.Status.Placement = &v1alpha1.Placement{
		Members: []string{"a", "b"}, Witness: "d", Standby: "c", Copies: []string{"a", "b", "c"}, Strength: 3, Storage: "gannet",
	}
	return vm
}

// heard are hosts of which these are.
func heard(names string) map[string]*v1alpha1.DunlinHost {
	hosts := map[string]*v1alpha1.DunlinHost{}
	for _, name := range strings.Split("abcdef", "") {
		hosts[name] = &v1alpha1.DunlinHost{}
		set(&hosts[name].Status.Conditions, 1, Ready, truth(strings.Contains(names, name)), "Test", "")
	}
	return hosts
}

// standing are Pods on these nodes, by copy; "-" is none.
func standing(nodes string) map[int]*v1.Pod {
	pods := map[int]*v1.Pod{}
	for number, node := range strings.Split(nodes, "") {
		pods[number] = &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("shop-%d", number)}, Spec: v1.PodSpec{NodeName: strings.Trim(node, "-")}}
	}
	return pods
}

// empty is a cluster that has whatever is named, and lists nothing.
type empty struct{ client.Client }

func (empty) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

func (empty) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return nil
}

// Three nodes are two copies and a standby where a fourth host can be the witness, and otherwise two copies and a witness, of which a person reads.
func TestAFourthHostMakesTheThirdTheStandby(t *testing.T) {
	placer := &placer{Client: empty{}}
	for _, one := range []struct{ heard, standby, witness, copies, file, says string }{
		{"abcd", "c", "d", "abc", `standby = "c"`, ""},
		{"abcdef", "c", "d", "abc", `standby = "c"`, ""},
		{"abc", "", "c", "", "", "it has no standby yet: that waits for a node with room whose host is heard and has no part in it"},
	} {
		vm := shop()
		vm.Spec.Strength = 3
		placement, why := placer.choose(context.Background(), vm, standing("abc"), heard(one.heard))
		if placement == nil {
			t.Fatal(why)
		}
		if strings.Join(placement.Members, "") != "ab" || placement.Standby != one.standby || placement.Witness != one.witness ||
			strings.Join(placement.Copies, "") != one.copies || placement.Strength != 3 {
			t.Errorf("%s are heard: %+v", one.heard, placement)
		}
		vm.Status.Placement = placement
		written, err := limits.File(vm)
		if err != nil || strings.Contains(written, "standby") != (one.file != "") || !strings.Contains(written, one.file) {
			t.Errorf("%s are heard: %v: %s", one.heard, err, written)
		}
		cannot, _ := (&host{name: "a"}).carryOut(context.Background(), vm, control.VM{Policy: "dunlin", Role: "primary", Standby: placement.Standby})
		if sentences(cannot) != one.says {
			t.Errorf("%s are heard: '%s'", one.heard, sentences(cannot))
		}
		if !reflect.DeepEqual(placement.DeepCopy(), placement) {
			t.Errorf("a copy is %+v", placement.DeepCopy())
		}
	}
	later := shop()
	later.Spec.Strength, later.Status.Primary = 3, "a"
	cannot, _ := (&host{name: "a"}).carryOut(context.Background(), later, control.VM{Policy: "dunlin", Role: "primary"})
	if said := sentences(cannot); said != "it has no standby yet: that waits for a node with room whose host is heard and has no part in it" {
		t.Errorf("a standby is asked for later: '%s'", said)
	}
}

// Whoever has lost its part is the standby, and the numbers of copies stay with their hosts. Where the daemon does not name the standby, the group tells who it is.
func TestTheStandbyFollowsTheGroup(t *testing.T) {
	for _, one := range []struct {
		leads, copies, witness, says string
		want                         string
	}{
		{"a", "b", "d", "c", "ab d c abc"}, {"a", "c", "d", "b", "ac d b abc"}, {"c", "b", "d", "a", "cb d a abc"}, {"c", "a", "d", "b", "ac d b abc"},
		{"a", "c", "d", "", "ac d b abc"}, {"a", "b", "d", "", "ab d c abc"},
		// An operator has moved a copy, and its number goes along.
		{"a", "e", "d", "c", "ae d c aec"}, {"a", "e", "d", "", "ae d c aec"},
		// A copy went on to the standby from the host that it had come to.
		{"a", "c", "d", "e", "ac d e aec"},
		// It went to the standby, and from there to another host.
		{"a", "e", "d", "b", "ae d b abe"},
		// One has left, and none has come yet: what the daemon says of a host that has a part counts for nothing.
		{"a", "", "d", "b", "ab d c abc"}, {"a", "", "d", "", "ab d c abc"},
		// A person has made the standby the witness, and another host the witness.
		{"a", "b", "c", "d", "ab c d abd"}, {"a", "b", "e", "c", "ab e c abc"},
	} {
		here := control.VM{Role: "primary", Standby: one.says, Peers: []control.Peer{{Host: one.witness, Witness: true}}}
		for _, name := range strings.Split(one.copies, "") {
			here.Peers = append(here.Peers, control.Peer{Host: name})
		}
		before := withStandby().Status.Placement
		now := follow(before, here, one.leads)
		got := strings.Join([]string{strings.Join(now.Members, ""), now.Witness, now.Standby, strings.Join(now.Copies, "")}, " ")
		if got != one.want {
			t.Errorf("%+v: %s", one, got)
		}
		if !reflect.DeepEqual(before, withStandby().Status.Placement) {
			t.Errorf("%+v: what was said before is changed", one)
		}
	}
	if now := follow(shop().Status.Placement, control.VM{Peers: []control.Peer{{Host: "b"}, {Host: "c", Witness: true}}}, "a"); now.Standby != "" || now.Copies != nil {
		t.Errorf("without a standby: %+v", now)
	}
}

// Hosts that are lost are the daemons' business while a standby is there. A host that answers, and should have no copy, is nothing that they see: the
// operator gives its part to the standby. A standby that is away changes nothing, and is no help.
func TestAPartGoesToTheStandbyFirst(t *testing.T) {
	placer := &placer{Client: empty{}}
	for _, one := range []struct {
		away        map[string]string
		free, heard string
		pods        string
		moves       string
		wishes      string
		reason      string
		says        []string
	}{
		{nil, "", "abcd", "abc", "", "a b c", "NotCounted", nil},
		{map[string]string{"b": Lost}, "e", "acde", "abc", "", "a b c", "Moves", []string{"host 'b' is lost: nothing is heard of it: copy 1 goes to host 'c', the standby"}},
		{map[string]string{"b": Lost}, "e", "acde", "a-c", "", "a b c", "Moves", []string{"copy 1 goes to host 'c', the standby", "Pod 'shop-1' does not stand on node 'b' for the copy there"}},
		{map[string]string{"b": Drained}, "e", "abcde", "a-c", "backup b c", "a b c", "Moves", []string{"host 'b' is being drained: copy 1 goes to host 'c', the standby", "Pod 'shop-1' does not stand"}},
		{map[string]string{"b": Deleted}, "", "acd", "abc", "backup b c", "a b c", "Moves", []string{"host 'b' is lost: its node was deleted: copy 1 goes to host 'c', the standby"}},
		{map[string]string{"b": Empty}, "", "abcd", "abc", "backup b c", "a b c", "Moves", []string{"host 'b' has nothing of it any more: copy 1 goes to host 'c', the standby"}},
		// Who serves it is handed over first.
		{map[string]string{"a": Drained}, "", "abcd", "-bc", "", "a b c", "Moves", []string{"copy 0 goes to host 'c', the standby", "Pod 'shop-0' does not stand"}},
		// The witness's place is nothing for the standby.
		{map[string]string{"d": Lost}, "", "abc", "abc", "", "a b c", "NoOtherNode", []string{"host 'd' is lost: nothing is heard of it: the witness stays there"}},
		{map[string]string{"d": Lost}, "e", "abce", "abc", "witness d e", "a b c", "NotCounted", []string{"the witness goes to another host as soon as it can"}},
		// The standby is away: another host is it as soon as the Pod is there.
		{map[string]string{"c": Lost}, "ef", "abdef", "abc", "", "a b ef", "NotCounted", []string{"host 'c' is lost: nothing is heard of it: its place as standby goes to another host as soon as it can"}},
		{map[string]string{"c": Drained}, "e", "abcde", "ab-", "", "a b e", "WaitsForPlace", []string{"host 'c' is being drained: its place as standby waits for another node with room ('kubectl describe pod shop-2')"}},
		{map[string]string{"c": Lost}, "e", "abde", "abe", "standby c e", "a b e", "NotCounted", []string{"host 'c' is lost: nothing is heard of it: its place as standby goes to another host as soon as it can"}},
		{map[string]string{"c": Deleted}, "", "abd", "abc", "", "a b c", "NoOtherNode", []string{"host 'c' is lost: its node was deleted: its place as standby stays there, since no other host is heard that has no part in the VM"}},
		{map[string]string{"c": Lost}, "", "abd", "ab-", "", "a b c", "NoOtherNode", []string{"its place as standby stays there", "Pod 'shop-2' does not stand on node 'c' for the standby there"}},
		// One of the group is not heard, and may be away soon: its part may need that host.
		{map[string]string{"c": Lost}, "e", "ade", "abe", "", "a b e", "NotCounted", []string{"its place as standby goes to another host as soon as it can"}},
		{map[string]string{"c": Lost, "d": Lost}, "e", "abe", "abe", "witness d e", "a b c", "CannotMove", []string{"it stays the standby as long as another host of the VM is away", "Pod 'shop-2' does not stand", "the witness goes to another host as soon as it can"}},
		{nil, "", "abcd", "ab-", "", "a b c", "NotCounted", []string{"Pod 'shop-2' does not stand on node 'c' for the standby there"}},
		// So is a copy's host: it is as without a standby.
		{map[string]string{"b": Lost, "c": Drained}, "e", "acde", "aec", "backup b e", "a e c", "CannotMove", []string{"copy 1 goes to another host as soon as it can", "it stays the standby as long as another host of the VM is away"}},
		{map[string]string{"b": Lost}, "ef", "adef", "a-c", "", "a ef c", "WaitsForPlace", []string{"copy 1 waits for another node with room"}},
	} {
		vm := withStandby()
		vm.Status.Primary, vm.Status.Standby = "a", "c"
		seen, pods := view{away: one.away, hosts: heard(one.heard)}, standing(one.pods)
		if one.free != "" {
			seen.free = strings.Split(one.free, "")
		}
		moves := ""
		if next := placer.next(context.Background(), vm, pods, seen); next != nil {
			moves = strings.Join([]string{next.Part, next.From, next.To}, " ")
		}
		var wishes []string
		for range pods {
			wishes = append(wishes, strings.Join(seen.wish(vm, len(wishes)), ""))
		}
		reason, all := seen.explain(vm, pods)
		if moves != one.moves || strings.Join(wishes, " ") != one.wishes || reason != one.reason || len(all) != len(one.says) {
			t.Errorf("%v away, %s heard: '%s', Pods ask for %v, %s %q", one.away, one.heard, moves, wishes, reason, all)
			continue
		}
		for at, says := range one.says {
			if !strings.Contains(all[at], says) {
				t.Errorf("%v away, %s heard: '%s', not '%s'", one.away, one.heard, all[at], says)
			}
		}
	}
}

// Its Pod stays while its part goes to the standby, and goes along to any other host.
func TestAPodStaysWhereTheStandbyTakesAPart(t *testing.T) {
	for to, want := range map[string]string{"c": "b", "e": "e"} {
		vm := withStandby()
		vm.Status.Moving = &v1alpha1.Moving{Part: PartBackup, From: "b", To: to, Why: Drained}
		if wish := (view{away: map[string]string{"b": Drained}, hosts: heard("abcde")}).wish(vm, 1); strings.Join(wish, "") != want {
			t.Errorf("it moves to host %s, and its Pod asks for %v", to, wish)
		}
	}
	// While the standby was not heard its Pod has found another node: it stays there as long as that is so.
	placer := &placer{patience: &patience{after: time.Hour, since: map[string]time.Time{}}}
	for names, fits := range map[string]bool{"ade": true, "acde": false} {
		seen := view{away: map[string]string{"b": Lost}, hosts: heard(names), free: []string{"e"}}
		vm, pod := withStandby(), standing("aec")[1]
		if placer.fits(vm, 1, pod, seen.wish(vm, 1), seen) != fits {
			t.Errorf("%s are heard: its Pod is on a host without a part", names)
		}
	}
}

// A part was to go to another host, and the standby has got it meanwhile: the order is void. While nobody has got it, it is not.
func TestAnOrderIsVoidWhenTheStandbyHasThePart(t *testing.T) {
	for _, one := range []struct {
		leads, copies string
		void          bool
	}{{"a", "b", false}, {"a", "", false}, {"a", "e", false}, {"a", "c", true}, {"e", "a", true}, {"b", "a", false}} {
		here := control.VM{Peers: []control.Peer{{Host: "d", Witness: true}}}
		for _, name := range strings.Fields(one.copies) {
			here.Peers = append(here.Peers, control.Peer{Host: name})
		}
		status := withStandby().Status
		status.Moving, status.Gone = &v1alpha1.Moving{Part: PartBackup, From: "b", To: "e", Why: Lost}, []string{"e"}
		host := &host{name: one.leads}
		if host.isTaken(here, *status.Moving) != one.void {
			t.Errorf("%+v", one)
		}
		if host.followGroup(here, false, &status); (status.Moving == nil) != one.void {
			t.Errorf("%+v: %+v", one, status.Moving)
		}
	}
}

// A standby may have got a part that nobody has told of, unless it is heard and has nothing.
func TestADeletedObjectWaitsForItsStandby(t *testing.T) {
	for _, one := range []struct{ gone, heard, says string }{
		{"abd", "abcd", "is being ended on host 'c'"}, {"abcd", "abcd", ""}, {"acd", "acd", ""}, {"cd", "cd", "host 'a' and 'b' cannot be asked"},
		{"ad", "ad", "host 'b' and 'c' cannot be asked to end the VM, and could serve it still"}, {"ab", "ab", "could serve it still"}, {"bd", "bd", "could serve it still"},
		{"abd", "abd", ""}, {"a", "a", "without a majority"},
		// What it said before it was silent does not count.
		{"acd", "ad", "host 'b' and 'c' cannot be asked to end the VM, and could serve it still"}, {"abcd", "abd", ""},
	} {
		vm := withStandby()
		vm.Status.Gone = strings.Split(one.gone, "")
		if said := holdUp(vm, heard(one.heard)); (said == "") != (one.says == "") || !strings.Contains(said, one.says) {
			t.Errorf("gone '%s', heard '%s': '%s', not '%s'", one.gone, one.heard, said, one.says)
		}
	}
	// A part is on its way to another host, and the standby is silent: b may have it, or e, or the standby.
	for gone, ends := range map[string]bool{"ad": false, "abd": false, "aed": false, "abed": true} {
		vm := withStandby()
		vm.Status.Moving = &v1alpha1.Moving{Part: PartBackup, From: "b", To: "e", Why: Lost}
		vm.Status.Gone = strings.Split(gone, "")
		if said := holdUp(vm, heard(gone)); (said == "") != ends {
			t.Errorf("gone '%s': '%s'", gone, said)
		}
	}
}

// known is a cluster in which every DunlinHost is this one, and that takes every word.
type known struct {
	client.Client
	host *v1alpha1.DunlinHost
}

func (known known) Get(_ context.Context, _ client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	known.host.DeepCopyInto(object.(*v1alpha1.DunlinHost))
	return nil
}

func (known) Status() client.SubResourceWriter { return written{} }

type written struct{ client.SubResourceWriter }

func (written) Patch(context.Context, client.Object, client.Patch, ...client.SubResourcePatchOption) error {
	return nil
}

// Daemons give a part to the standby without asking its operator, so that this one has to know of the VM before the VM runs.
func TestAVMIsNotStartedBeforeItsStandbyKnowsOfIt(t *testing.T) {
	for _, one := range []struct {
		remembers, heard bool
		again            time.Duration
		state            string
	}{{true, true, 0, ""}, {true, false, 0, ""}, {false, true, soon, ""}, {false, false, later, "refused"}} {
		vm, there := withStandby(), &v1alpha1.DunlinHost{}
		set(&there.Status.Conditions, 1, Ready, truth(one.heard), "Test", "")
		there.Status.VMs = []v1alpha1.HostVM{{VM: "another"}}
		if one.remembers {
			there.Status.VMs = append(there.Status.VMs, v1alpha1.HostVM{VM: NameOnHosts(vm)})
		}
		host := &host{Client: known{host: there}, name: "a", events: record.NewFakeRecorder(1)}
		again, err := host.waitsForStandby(context.Background(), vm)
		if again != one.again || err != nil || vm.Status.State != one.state {
			t.Errorf("%+v: %v, %v, '%s'", one, again, err, vm.Status.State)
		}
		if again, err := host.waitsForStandby(context.Background(), shop()); again != 0 || err != nil {
			t.Errorf("without a standby: %v, %v", again, err)
		}
	}
}

// Whoever may get a part is one of the hosts, is not empty because it has nothing, and is in no group.
func TestAStandbyIsOneOfTheHosts(t *testing.T) {
	vm := withStandby()
	if group, hosts := vm.Status.Placement.Hosts(), vm.Status.Hosts(); strings.Join(group, "") != "abd" || strings.Join(hosts, "") != "abcd" {
		t.Errorf("the group is %v, the hosts are %v", group, hosts)
	}
	vm.Status.Moving = &v1alpha1.Moving{Part: PartBackup, From: "b", To: "c", Why: Drained}
	if hosts := vm.Status.Hosts(); strings.Join(hosts, "") != "abcd" {
		t.Errorf("it is being given a part, and the hosts are %v", hosts)
	}
	placer := &placer{Client: empty{}, patience: &patience{since: map[string]time.Time{}}}
	vm.Status.Gone, vm.Status.Moving = []string{"b", "c"}, nil
	for name, is := range map[string]string{"a": "", "b": Empty, "c": ""} {
		if why, _, err := placer.why(context.Background(), vm, name, heard("abcd")); why != is || err != nil {
			t.Errorf("host %s is away because it is '%s', %v", name, why, err)
		}
	}
	if said := itsHosts(vm.Status.Placement); said != "its hosts are a, b, d; its standby is c" {
		t.Error(said)
	}
}
