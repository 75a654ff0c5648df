package operator

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sort"
	"strings"

	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// needsOf are what a copy needs of a host that has nothing of it yet. A guest's copies run alike: where one is there already, the next one's host is as its is.
func needsOf(object v1alpha1.Protected, hosts map[string]*v1alpha1.DunlinHost) v1alpha1.Needs {
	if program, is := object.(*v1alpha1.ProtectedProgram); is {
		return v1alpha1.Needs{Data: program.Spec.Program.Data, DataMiB: program.Spec.Program.DataMiB}
	}
	var needs v1alpha1.Needs
	switch object.(*v1alpha1.ProtectedVM).Spec.VM.Accel {
	case "tcg":
	case "kvm":
		needs.KVM = v1alpha1.KVMNeeded
	default:
		needs.KVM = v1alpha1.KVMAlike
		if serves := hosts[object.Seen().Primary]; serves != nil && serves.Status.KVM {
			needs.KVM = v1alpha1.KVMNeeded
		} else if serves != nil {
			needs.KVM = v1alpha1.KVMNone
		}
	}
	return needs
}

// needsAt are those that a Pod says which asks for these hosts; none where the copy that it stands for is there.
func needsAt(object v1alpha1.Protected, number int, wish []string, hosts map[string]*v1alpha1.DunlinHost) *v1alpha1.Needs {
	if placement := object.Seen().Placement; placement != nil {
		if homes := placement.Homes(); len(wish) == 0 || number < len(homes) && slices.Equal(wish, homes[number:number+1]) {
			return nil
		}
	}
	needs := needsOf(object, hosts)
	return &needs
}

// candidates are the hosts that have no part in an object, and could have one.
type candidates struct {
	// free could have a copy, and others only be the witness.
	free, others []string
	// lacks are what those lack that could not have a copy.
	lacks map[string]string
}

// candidates finds them: hosts that are heard and not cordoned. Those that have refused lately are left out as long as there are others.
func (placer *placer) candidates(ctx context.Context, object v1alpha1.Protected, hosts map[string]*v1alpha1.DunlinHost) (candidates, error) {
	found, needs := candidates{lacks: map[string]string{}}, needsOf(object, hosts)
	var refused []string
	for name, host := range hosts {
		if !isHeard(host) || has(object.Seen().Hosts(), name) || host.Spec.Copies != nil && !*host.Spec.Copies {
			continue
		}
		node := &v1.Node{}
		if err := placer.Get(ctx, client.ObjectKey{Name: name}, node); client.IgnoreNotFound(err) != nil {
			return found, err
		} else if err != nil || node.Spec.Unschedulable {
			continue
		}
		if why := needs.Lacks(host); why != "" {
			found.others, found.lacks[name] = append(found.others, name), why
		} else if placer.refusals.lately(object, name) {
			refused = append(refused, name)
		} else {
			found.free = append(found.free, name)
		}
	}
	if len(found.free) == 0 {
		found.free = refused
	}
	sort.Strings(found.free)
	sort.Strings(found.others)
	return found, nil
}

// mostNamed are the hosts that are named with what they lack.
const mostNamed = 5

// saysLacks says what hosts lack, for a person; nothing if they lack nothing.
func saysLacks(lacks map[string]string) string {
	var names, all []string
	for name := range lacks {
		names = append(names, name)
	}
	sort.Strings(names)
	for at, name := range names {
		if at == mostNamed {
			all = append(all, fmt.Sprintf("and %d more", len(names)-at))
			break
		}
		all = append(all, fmt.Sprintf("host '%s': %s", name, lacks[name]))
	}
	return strings.Join(all, ", ")
}

// tooFew says, of an object that waits for its first nodes, why fewer hosts could have a copy than there are copies; nothing if there are enough.
func tooFew(object v1alpha1.Protected, hosts map[string]*v1alpha1.DunlinHost) string {
	var names []string
	for name := range hosts {
		names = append(names, name)
	}
	copies := object.Asked().Strength
	lacks := needsOf(object, hosts).Lack(hosts, names, copies)
	if fit := len(names) - len(lacks); fit < copies && len(lacks) > 0 {
		return fmt.Sprintf("%d of %d hosts could have a copy, and it takes %d: %s", fit, len(names), copies, saysLacks(lacks))
	}
	return ""
}

// dataThere are the images of programs' data that are on this host, as far as programs may have them.
func dataThere(programs []v1alpha1.Protected, images string) []string {
	var there []string
	for _, object := range programs {
		program, is := object.(*v1alpha1.ProtectedProgram)
		if !is || program.Spec.Program.Data == "" || !isIn(program.Spec.Program.Data, own(images, program.Namespace)) {
			continue
		}
		if _, err := os.Stat(program.Spec.Program.Data); err == nil {
			there = append(there, program.Spec.Program.Data)
		}
	}
	sort.Strings(there)
	return slices.Compact(there)
}
