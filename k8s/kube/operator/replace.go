package operator

import (
	"slices"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// Another standby in place of one that is away for good, or drained: its Pod is made anew for hosts without a part -> where that has a node, the elected operator writes
// that the place as standby moves there -> the new host's operator remembers the VM, and says that it has nothing -> the operator on the host that leads has the daemons
// name it -> the placement says what the daemons say.
//
// It comes last. The daemons name nobody while one of the group is not heard, and a host without a part is needed more by a copy or a witness that has lost its own.
// Invariant: an order that is on its way and waits for one of the group gives way to that one's part, since one part moves at a time.

// replacesStandby says whether the standby is away, and another host may be it instead.
func (view view) replacesStandby(object v1alpha1.Protected) bool {
	placement := object.Seen().Placement
	return placement.Standby != "" && view.away[placement.Standby] != "" && moves(object) && object.Asked().Strength == 3 && !view.lacksPart(object)
}

// lacksPart says whether one of the group is away, so that its part needs another host.
func (view view) lacksPart(object v1alpha1.Protected) bool {
	return slices.ContainsFunc(object.Seen().Placement.Hosts(), func(name string) bool { return view.away[name] != "" })
}

// allAreHeard says whether all of the group are, so that daemons could name a standby.
func (view view) allAreHeard(object v1alpha1.Protected) bool {
	return !view.lacksPart(object) && !anyIsSilent(object.Seen().Placement.Hosts(), view.hosts)
}

func anyIsSilent(names []string, hosts map[string]*v1alpha1.DunlinHost) bool {
	return slices.ContainsFunc(names, func(name string) bool { return isSilent(name, hosts) })
}

// nextStandby is the host that is to be the standby instead of one that is away, when the standby's Pod stands there.
func (view view) nextStandby(object v1alpha1.Protected, on string) *v1alpha1.Moving {
	if !view.replacesStandby(object) || !view.allAreHeard(object) || !has(view.free, on) {
		return nil
	}
	standby := object.Seen().Placement.Standby
	return &v1alpha1.Moving{Part: PartStandby, From: standby, To: on, Why: view.away[standby]}
}

// isNamed says whether there is nothing left to do of another standby: it is named, or the daemons have yet another one, or the old one or the new one has a part.
func (host *host) isNamed(here control.VM, moving v1alpha1.Moving) bool {
	hasPart := func(name string) bool { return name == host.name || inGroup(here, name) }
	return here.Standby != "" && here.Standby != moving.From || hasPart(moving.From) || hasPart(moving.To)
}

// staysStandby says whether no other standby is to be named now, whatever has become of the old one: it is not asked for, or the daemons would wait for one of the group.
func staysStandby(object v1alpha1.Protected, hosts map[string]*v1alpha1.DunlinHost) bool {
	return object.Asked().Strength != 3 || anyIsSilent(object.Seen().Placement.Hosts(), hosts)
}
