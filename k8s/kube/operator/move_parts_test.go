package operator

import (
	"reflect"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// The hosts are what the group says: whoever has left is followed by whoever has come, and while one has left and none has come nothing is said.
func TestHostsFollowTheGroup(t *testing.T) {
	for _, one := range []struct {
		leads     string
		copies    []string
		witnesses []string
		want      string
	}{
		{"a", []string{"b"}, []string{"c"}, "a b c"}, {"a", []string{"d"}, []string{"c"}, "a d c"}, {"b", []string{"d"}, []string{"c"}, "d b c"},
		{"a", nil, []string{"c"}, "a b c"}, {"a", []string{"b", "d"}, []string{"c"}, "a b c"}, {"a", []string{"b"}, []string{"d"}, "a b d"},
		{"a", []string{"b"}, nil, "a b c"}, {"a", []string{"c"}, []string{"d"}, "a c d"}, {"d", []string{"a"}, []string{"c"}, "a d c"},
	} {
		here := control.VM{Role: "primary"}
		for _, name := range one.copies {
			here.Peers = append(here.Peers, control.Peer{Host: name})
		}
		for _, name := range one.witnesses {
			here.Peers = append(here.Peers, control.Peer{Host: name, Witness: true})
		}
		before := shop().Status.Placement
		if got := strings.Join(follow(before, here, one.leads).Hosts(), " "); got != one.want {
			t.Errorf("%+v: the hosts are %s", one, got)
		}
		if !reflect.DeepEqual(before, shop().Status.Placement) {
			t.Errorf("%+v: what was said before is changed", one)
		}
	}
}

// While a part is on its way, nobody may be able to serve the VM in the old group nor in the new one.
func TestADeletedObjectWaitsForBothGroups(t *testing.T) {
	for _, one := range []struct{ gone, says string }{
		{"ac", ""}, {"bc", "cannot be asked"}, {"cd", "cannot be asked"}, {"bcd", ""}, {"a", "cannot be asked"}, {"", "cannot be asked"},
	} {
		vm := shop()
		vm.Status.Moving = &v1alpha1.Moving{Part: PartBackup, From: "b", To: "d", Why: Lost}
		vm.Status.Gone = strings.Split(one.gone, "")
		if said := holdUp(vm, nil); (said == "") != (one.says == "") || !strings.Contains(said, one.says) {
			t.Errorf("gone '%s': '%s'", one.gone, said)
		}
	}
	vm, heard := shop(), &v1alpha1.DunlinHost{}
	vm.Status.Moving = &v1alpha1.Moving{Part: PartBackup, From: "b", To: "d", Why: Lost}
	vm.Status.Gone = []string{"a", "b", "c"}
	set(&heard.Status.Conditions, 1, Ready, metav1.ConditionTrue, "Test", "")
	if said := holdUp(vm, map[string]*v1alpha1.DunlinHost{"d": heard}); !strings.Contains(said, "is being ended on host 'd'") {
		t.Errorf("the host that gets a part has it: '%s'", said)
	}
}

// Each part that is not where it is to be is spoken of, with what it waits for.
func TestAPersonReadsWhyAPartDoesNotMove(t *testing.T) {
	on := func(node string) *v1.Pod {
		return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "shop-1"}, Spec: v1.PodSpec{NodeName: node}}
	}
	moving := shop()
	moving.Status.Moving = &v1alpha1.Moving{Part: PartBackup, From: "b", To: "d", Why: Lost}
	single := shop()
	single.Status.Placement = &v1alpha1.Placement{Members: []string{"a", "b"}, Strength: 2}
	for _, one := range []struct {
		object       v1alpha1.Protected
		away         map[string]string
		free         []string
		pod          *v1.Pod
		reason, says string
	}{
		{shop(), nil, nil, on("b"), "NotCounted", ""},
		{shop(), nil, nil, on(""), "NotCounted", "Pod 'shop-1' does not stand on node 'b' for the copy there"},
		{shop(), map[string]string{"b": Lost}, []string{"d"}, on(""), "WaitsForPlace", "host 'b' is lost: nothing is heard of it: copy 1 waits for another node with room ('kubectl describe pod shop-1')"},
		{shop(), map[string]string{"b": Drained}, nil, on(""), "NoOtherNode", "host 'b' is being drained: copy 1 stays there, since no other host is heard that has no part in the VM"},
		{shop(), map[string]string{"c": Lost}, nil, on("b"), "NoOtherNode", "host 'c' is lost: nothing is heard of it: the witness stays there"},
		{moving, map[string]string{"b": Lost}, nil, on("d"), "Moves", "host 'b' is lost: nothing is heard of it: copy 1 goes to host 'd'"},
		{moving, nil, nil, on("d"), "Moves", "host 'b' was away and is there again"},
		{sessions(), map[string]string{"b": Lost}, []string{"d"}, on(""), "WaitsForPlace", "host 'b' is lost: nothing is heard of it: copy 1 waits for another node with room"},
		{sessions(), map[string]string{"c": Lost}, nil, on("b"), "NoOtherNode", "the witness stays there, since no other host is heard that has no part in the program"},
		{single, map[string]string{"b": Lost}, []string{"d"}, on("b"), "CannotMove", "there is no second copy from which copy 1 could be made anew"},
	} {
		seen := view{away: one.away, free: one.free}
		reason, all := seen.explain(one.object, map[int]*v1.Pod{0: on("a"), 1: one.pod})
		if said := sentences(all); reason != one.reason || (said == "") != (one.says == "") || !strings.Contains(said, one.says) {
			t.Errorf("%v, free %v: %s '%s', not %s '%s'", one.away, one.free, reason, said, one.reason, one.says)
		}
	}
}

// A Pod asks for where its copy is, or for all hosts where it could go, and says so as it was told.
func TestAPodAsksForItsHosts(t *testing.T) {
	vm, program := shop(), sessions()
	for _, one := range []struct {
		object v1alpha1.Protected
		away   map[string]string
		free   []string
		want   string
	}{
		{vm, nil, nil, "b"}, {vm, map[string]string{"b": Lost}, nil, "b"}, {vm, map[string]string{"b": Lost}, []string{"d", "e"}, "d e"},
		{vm, map[string]string{"a": Lost}, []string{"d"}, "b"}, {program, map[string]string{"b": Lost}, []string{"d"}, "d"},
	} {
		wish := view{away: one.away, free: one.free}.wish(one.object, 1)
		if got := strings.Join(wishOf(pod(one.object, 1, 2, wish, nil, "")), " "); got != one.want {
			t.Errorf("%v, free %v: %s", one.away, one.free, got)
		}
	}
	vm.Status.Moving = &v1alpha1.Moving{Part: PartBackup, From: "b", To: "d", Why: Lost}
	if wish := (view{free: []string{"e"}}).wish(vm, 1); strings.Join(wish, " ") != "d" {
		t.Errorf("it moves to host d, and its Pod asks for %v", wish)
	}
	if wish := wishOf(pod(vm, 1, 2, nil, nil, "")); wish != nil {
		t.Errorf("it may go anywhere, and asks for %v", wish)
	}
}

// Silence counts when it has lasted, without a break; and a host that another host's daemon is connected with is not silent.
func TestAHostIsLostWhenItIsSilentForLong(t *testing.T) {
	patience := &patience{after: time.Hour, since: map[string]time.Time{}}
	if lost, left := patience.lasts("b", true); lost || left <= 0 || left > time.Hour {
		t.Error(lost, left)
	}
	patience.since["b"] = time.Now().Add(-2 * time.Hour)
	if lost, left := patience.lasts("b", true); !lost || left != 0 {
		t.Error(lost, left)
	}
	if lost, left := patience.lasts("b", false); lost || left != 0 {
		t.Error(lost, left)
	}
	if lost, left := patience.lasts("b", true); lost || left <= 0 {
		t.Error("it was heard meanwhile, and counts as lost", left)
	}
	patience.forget("b")
	if len(patience.since) > 0 {
		t.Error(patience.since)
	}
	host := func(ready metav1.ConditionStatus, linked bool) *v1alpha1.DunlinHost {
		host := &v1alpha1.DunlinHost{Status: v1alpha1.DunlinHostStatus{Links: []v1alpha1.Link{{Host: "b", Connected: linked}}}}
		set(&host.Status.Conditions, 1, Ready, ready, "Test", "")
		return host
	}
	for _, one := range []struct {
		a, b   *v1alpha1.DunlinHost
		silent bool
	}{
		{host(metav1.ConditionTrue, false), host(metav1.ConditionTrue, false), false}, {host(metav1.ConditionTrue, false), host(metav1.ConditionUnknown, false), true},
		{host(metav1.ConditionTrue, false), nil, true}, {host(metav1.ConditionTrue, true), host(metav1.ConditionFalse, false), false},
		{host(metav1.ConditionUnknown, true), host(metav1.ConditionFalse, false), true},
	} {
		hosts := map[string]*v1alpha1.DunlinHost{"a": one.a}
		if one.b != nil {
			hosts["b"] = one.b
		}
		if isSilent("b", hosts) != one.silent {
			t.Errorf("%+v, %+v: silent is not %v", one.a.Status, one.b, one.silent)
		}
	}
}
