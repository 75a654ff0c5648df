package v1alpha1

import (
	"encoding/json"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
)

// NeedsAnnotation is, on a Pod that stands for a copy which is not there yet, what the copy needs of its node beside what the Pod asks for: [Needs], as JSON. A
// scheduler places such a Pod by the node's DunlinHost; a Pod without it is placed as any other.
const NeedsAnnotation = "dunlin.dev/needs"

// What a copy needs of KVM.
const (
	// KVMNeeded: its node has to have it.
	KVMNeeded = "needed"
	// KVMAlike: the nodes of all copies have it, or none has: guests that run in different ways have no common state.
	KVMAlike = "alike"
	// KVMNone: its node must not have it, since the copy that is there runs without.
	KVMNone = "none"
)

// Needs are what a copy needs of its node's DunlinHost. Nothing at all is that the host is heard, and takes copies.
//
// +kubebuilder:object:generate=false
type Needs struct {
	// KVM is one of the words above; nothing if the copy runs in the same way with and without.
	KVM string `json:"kvm,omitempty"`
	// Data is the image that is made where the copy goes, if it is not there already, and DataMiB its size.
	Data    string `json:"data,omitempty"`
	DataMiB int64  `json:"dataMiB,omitempty"`
}

// String is the annotation's value.
func (needs Needs) String() string {
	data, err := json.Marshal(needs)
	if err != nil {
		panic(err) // plain data: a programmer's error
	}
	return string(data)
}

// ReadNeeds returns what a Pod's annotations say, and whether they say it. What nobody can read asks for as little as nothing does.
func ReadNeeds(annotations map[string]string) (Needs, bool) {
	text, said := annotations[NeedsAnnotation]
	var needs Needs
	if said && json.Unmarshal([]byte(text), &needs) != nil {
		needs = Needs{}
	}
	return needs, said
}

// Lacks is what a node lacks for such a copy, for a person; nothing if it lacks nothing. There is no host of a node without Dunlin. It has no numbers that change
// by themselves: whoever is told of it is told once.
func (needs Needs) Lacks(host *DunlinHost) string {
	switch {
	case host == nil:
		return "it has no DunlinHost"
	case !meta.IsStatusConditionTrue(host.Status.Conditions, "Ready"):
		return "no daemon of Dunlin's is heard there"
	case host.Spec.Copies != nil && !*host.Spec.Copies:
		return "its DunlinHost takes no copies"
	case needs.KVM == KVMNeeded && !host.Status.KVM:
		return "it has no KVM"
	case needs.KVM == KVMNone && host.Status.KVM:
		return "it has KVM, and the copies run without"
	case needs.DataMiB > host.Status.DiskFreeMiB && !slices.Contains(host.Status.Data, needs.Data):
		return fmt.Sprintf("less than %d MiB are free where images lie", needs.DataMiB)
	}
	return ""
}

// Lack is what each of these nodes lacks for one of so many copies. Where the copies have to be alike, they go where KVM is, if there are enough such nodes, and else
// where it is not.
func (needs Needs) Lack(hosts map[string]*DunlinHost, nodes []string, copies int) map[string]string {
	lack, with, without := map[string]string{}, 0, 0
	for _, node := range nodes {
		if why := needs.Lacks(hosts[node]); why != "" {
			lack[node] = why
		} else if hosts[node].Status.KVM {
			with++
		} else {
			without++
		}
	}
	if needs.KVM != KVMAlike || copies < 2 || with == 0 || without == 0 {
		return lack
	}
	for _, node := range nodes {
		hasKVM := lack[node] == "" && hosts[node].Status.KVM
		switch {
		case lack[node] != "" || with >= copies && hasKVM:
		case with >= copies:
			lack[node] = "it has no KVM"
		case without >= copies && !hasKVM:
		case hasKVM:
			lack[node] = fmt.Sprintf("it has KVM as fewer than %d nodes have, and the copies have to run alike", copies)
		default:
			lack[node] = fmt.Sprintf("it has no KVM, and the copies have to run alike: fewer than %d nodes have none", copies)
		}
	}
	return lack
}
