package operator

import (
	"context"
	"testing"
	"time"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// What is counted of an object goes with what this host has of it, unless there is another one of that name.
func TestWhatIsCountedGoesWithTheObject(t *testing.T) {
	for _, one := range []struct {
		kind  *kind
		again bool
	}{{vms, false}, {vms, true}, {programs, false}, {programs, true}} {
		count := func(value float64) {
			one.kind.protected.WithLabelValues("shops", "shop").Set(value)
			one.kind.failOvers.WithLabelValues("shops", "shop").Inc()
		}
		count(1)
		mine := func(name string) v1alpha1.HostVM {
			return v1alpha1.HostVM{VM: name, Kind: one.kind.name, Namespace: "shops", Name: "shop"}
		}
		report := &report{read: true, vms: map[string]v1alpha1.HostVM{"shop.1": mine("shop.1")}, times: map[string]int{"shop.1": 1}}
		if one.again {
			report.vms["shop.2"], report.times["shop.2"] = mine("shop.2"), 1
		}
		(&host{report: report}).drop(memory{mine("shop.1"), 1})
		left := 0
		if one.again {
			left = 1
		}
		if protected, failOvers := len(gauges(t, one.kind.protected)), len(gauges(t, one.kind.failOvers)); protected != left || failOvers != left || len(report.vms) != left {
			t.Errorf("%s, another one: %v: told of are %d and %d, remembered %v", one.kind.name, one.again, protected, failOvers, report.vms)
		}
		one.kind.protected.Reset()
		one.kind.failOvers.Reset()
	}
}

// A host that is to be the standby and is silent is not asked for ten times a second.
func TestASilentHostIsNotNamedInALoop(t *testing.T) {
	for heard, want := range map[bool]time.Duration{true: soon, false: later} {
		vm, there := withStandby(), &v1alpha1.DunlinHost{}
		set(&there.Status.Conditions, 1, Ready, truth(heard), "Test", "")
		here := control.VM{Name: NameOnHosts(vm), Role: "primary", Peers: []control.Peer{{Host: "b"}, {Host: "d", Witness: true}}}
		refused, again := (&host{Client: known{host: there}, name: "a"}).nameStandby(context.Background(), vm, here)
		if again != want || refused == "" {
			t.Errorf("it is heard: %v: again in %v: '%s'", heard, again, refused)
		}
	}
}
