package v1alpha1

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Protected is a ProtectedVM or a ProtectedProgram: an operator carries both out in the same way.
//
// +kubebuilder:object:generate=false
type Protected interface {
	metav1.Object
	runtime.Object
	// Asked is what is wanted, and may change while it exists.
	Asked() Asked
	// Seen is its status.
	Seen() *ProtectedStatus
}

// Asked is what is wanted of the copies of a VM or a program.
//
// +kubebuilder:object:generate=false
type Asked struct {
	Strength        int
	Policy, Storage string
}

// Asked is what is wanted of the VM's copies.
func (vm *ProtectedVM) Asked() Asked { return Asked{vm.Spec.Strength, vm.Spec.Policy, vm.Spec.Storage} }

// Seen is the VM's status.
func (vm *ProtectedVM) Seen() *ProtectedStatus { return &vm.Status }

// Asked is what is wanted of the program's copies. What they write is in memory, so they have no storage.
func (program *ProtectedProgram) Asked() Asked {
	return Asked{Strength: program.Spec.Strength, Policy: program.Spec.Policy}
}

// Seen is the program's status.
func (program *ProtectedProgram) Seen() *ProtectedStatus { return &program.Status }

// ProtectedStatus is what is there, of a VM or a program.
type ProtectedStatus struct {
	ObservedGeneration int64  `json:"observedGeneration,omitempty"`
	State              string `json:"state,omitempty"`
	Primary            string `json:"primary,omitempty"`
	Backup             string `json:"backup,omitempty"`
	Standby            string `json:"standby,omitempty"`
	Witness            string `json:"witness,omitempty"`
	// Strength is the one that is carried out.
	Strength     int          `json:"strength,omitempty"`
	LastFailOver *metav1.Time `json:"lastFailOver,omitempty"`
	// VM is its name on its hosts, as 'dunlin status' shows it.
	VM string `json:"vm,omitempty"`
	// Placement is what it was started with; its hosts are those that its group says it has.
	Placement *Placement `json:"placement,omitempty"`
	// Moving is a part that is being given to another host.
	Moving *Moving `json:"moving,omitempty"`
	// Refusal is of a host that is to have a part, or to be the standby, and does not take it.
	Refusal *Refusal `json:"refusal,omitempty"`
	// Started is when it was first seen on its hosts.
	Started *metav1.Time `json:"started,omitempty"`
	// Term is the reign of the primary that said this: who led in an earlier one says nothing any more.
	Term int64 `json:"term,omitempty"`
	// Gone are the hosts that have nothing of it, or nothing any more.
	Gone       []string           `json:"gone,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Placement is where a VM or a program is, and what cannot be changed while it is there.
type Placement struct {
	// Members have the copies; by the copies' numbers, where there is no standby.
	Members []string `json:"members"`
	// Witness only agrees; there is none of an unprotected VM.
	Witness string `json:"witness,omitempty"`
	// Standby has nothing until it gets the part of a member that stays away, which is the standby then.
	Standby string `json:"standby,omitempty"`
	// Copies are the members and the standby by the copies' numbers, where there is a standby: a number stays with its host while the two change places.
	Copies []string `json:"copies,omitempty"`
	// Strength and Storage are those of when it was placed.
	Strength int    `json:"strength"`
	Storage  string `json:"storage,omitempty"`
}

// Moving is a part that goes from one host to another. The elected operator writes it, and the operator on the host that leads the group carries it out.
type Moving struct {
	// Part is "backup", "witness" or "standby".
	Part string `json:"part"`
	From string `json:"from"`
	To   string `json:"to"`
	// Why is what has become of the host that had it: "Lost", "Deleted", "Empty", "Drained" or "Refused".
	Why string `json:"why"`
}

// Refusal is a host's word that it does not take a part: an image is not there, for example. The operator on the host that leads the group writes it, and the elected
// one has another host be asked, if there is one.
type Refusal struct {
	Host string `json:"host"`
	Why  string `json:"why"`
}

// Hosts are all that have a part in it: its group.
func (placement *Placement) Hosts() []string {
	hosts := slices.Clone(placement.Members)
	if placement.Witness != "" {
		hosts = append(hosts, placement.Witness)
	}
	return hosts
}

// Homes are the hosts by the numbers of the Pods that stand for them, and after these the witness, if no Pod stands for it.
func (placement *Placement) Homes() []string {
	homes := slices.Clone(placement.Copies)
	if len(homes) == 0 {
		homes = slices.Clone(placement.Members)
	}
	if placement.Witness != "" && !slices.Contains(homes, placement.Witness) {
		homes = append(homes, placement.Witness)
	}
	return homes
}

// Spare is the number of the Pod that stands for no copy: the standby's, or the one that is to be the standby's.
func (placement *Placement) Spare() int {
	for number, name := range placement.Copies {
		if !slices.Contains(placement.Members, name) {
			return number
		}
	}
	return len(placement.Members)
}

// Standbys are the host that may get a part as its standby, and the one that is to be that instead.
func (status *ProtectedStatus) Standbys() []string {
	var standbys []string
	if status.Placement != nil && status.Placement.Standby != "" {
		standbys = append(standbys, status.Placement.Standby)
	}
	if status.Moving != nil && status.Moving.Part == "standby" {
		standbys = append(standbys, status.Moving.To)
	}
	return standbys
}

// Hosts are all that have a part in it, are being given one, or may get one as its standby: [Placement.Homes], and perhaps one more.
func (status *ProtectedStatus) Hosts() []string {
	if status.Placement == nil {
		return nil
	}
	hosts := status.Placement.Homes()
	if status.Moving != nil && !slices.Contains(hosts, status.Moving.To) {
		hosts = append(hosts, status.Moving.To)
	}
	return hosts
}
