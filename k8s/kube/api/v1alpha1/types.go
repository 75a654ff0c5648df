// Package v1alpha1 has Dunlin's resources as Go values. What is a right one is said by the definitions (crds), which the API server checks.
//
// +kubebuilder:object:generate=true
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Version is the group and version of all of them.
var Version = schema.GroupVersion{Group: "dunlin.dev", Version: "v1alpha1"}

// ProtectedVM is a virtual machine that runs as copies on different nodes.
//
// +kubebuilder:object:root=true
type ProtectedVM struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ProtectedVMSpec `json:"spec"`
	Status            ProtectedStatus `json:"status,omitempty"`
}

// ProtectedVMSpec is what is wanted.
type ProtectedVMSpec struct {
	// Strength is R: how many copies run, each on a node of its own.
	Strength int `json:"strength,omitempty"`
	// Policy is how the copies are kept alike.
	Policy string `json:"policy,omitempty"`
	// Storage is what a backup does with the primary's writes.
	Storage string `json:"storage,omitempty"`
	// StandbyAfterSeconds is how long a copy's host has to be away until the standby gets its part. It does not change.
	StandbyAfterSeconds int64 `json:"standbyAfterSeconds,omitempty"`
	// StandbyCheckpointSeconds is how often the standby gets a checkpoint of the VM's memory; 0: never. It does not change.
	StandbyCheckpointSeconds int64 `json:"standbyCheckpointSeconds,omitempty"`
	VM                       VM    `json:"vm"`
}

// VM is the virtual hardware. It does not change.
type VM struct {
	MemoryMiB int64  `json:"memoryMiB"`
	VCPUs     int    `json:"vcpus,omitempty"`
	Machine   string `json:"machine,omitempty"`
	Firmware  string `json:"firmware,omitempty"`
	Accel     string `json:"accel,omitempty"`
	CPU       string `json:"cpu,omitempty"`
	Kernel    string `json:"kernel,omitempty"`
	Initrd    string `json:"initrd,omitempty"`
	Append    string `json:"append,omitempty"`
	Disks     []Disk `json:"disks,omitempty"`
	NICs      []NIC  `json:"nics,omitempty"`
}

// Disk is an image or a block device, the same path and size on each node.
type Disk struct {
	Path   string `json:"path"`
	Format string `json:"format,omitempty"`
}

// NIC is a network card.
type NIC struct {
	MAC    string `json:"mac"`
	Bridge string `json:"bridge,omitempty"`
}

// DunlinHost is a node that can run copies, under the node's name.
//
// +kubebuilder:object:root=true
type DunlinHost struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              DunlinHostSpec   `json:"spec"`
	Status            DunlinHostStatus `json:"status,omitempty"`
}

// DunlinHostSpec is what copies may take.
type DunlinHostSpec struct {
	// Copies says whether any are placed there; if it is left out, they are.
	Copies *bool `json:"copies,omitempty"`
	// MemoryMiB and DiskMiB bound what copies take; without them the node does.
	MemoryMiB *int64 `json:"memoryMiB,omitempty"`
	DiskMiB   *int64 `json:"diskMiB,omitempty"`
	// Address is where other hosts reach its daemon.
	Address string `json:"address,omitempty"`
}

// DunlinHostStatus is what its daemon reports.
type DunlinHostStatus struct {
	// KVM says whether VMs that ask for it get it there.
	KVM         bool   `json:"kvm,omitempty"`
	Version     string `json:"version,omitempty"`
	DiskFreeMiB int64  `json:"diskFreeMiB,omitempty"`
	Links       []Link `json:"links,omitempty"`
	// Data are the images of ProtectedPrograms' data that are there, whose programs need no more of the disk.
	Data []string `json:"data,omitempty"`
	// Heard is when the operator on the host said this last.
	Heard *metav1.Time `json:"heard,omitempty"`
	// VMs are those of ProtectedVMs, and programs of ProtectedPrograms, in which the host has, had, or may get a part: what is left of one that is no more is taken away.
	VMs        []HostVM           `json:"vms,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// HostVM is a ProtectedVM's VM, or a ProtectedProgram's program, on a host.
type HostVM struct {
	// VM is its name there.
	VM string `json:"vm"`
	// Kind is the object's; a ProtectedVM if it is left out.
	Kind      string `json:"kind,omitempty"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Link is a connection with another host's daemon.
type Link struct {
	Host      string `json:"host"`
	Connected bool   `json:"connected"`
}

// ReplicaQuota is what a namespace's tasks may have, with all their copies.
//
// +kubebuilder:object:root=true
type ReplicaQuota struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ReplicaQuotaSpec   `json:"spec"`
	Status            ReplicaQuotaStatus `json:"status,omitempty"`
}

// ReplicaQuotaSpec bounds the sum over all copies; what is left out is the whole cluster's.
type ReplicaQuotaSpec struct {
	// MostStrength is the largest R: what is free is divided by it.
	MostStrength int    `json:"mostStrength,omitempty"`
	MilliCPU     *int64 `json:"milliCPU,omitempty"`
	MemoryMiB    *int64 `json:"memoryMiB,omitempty"`
	DiskMiB      *int64 `json:"diskMiB,omitempty"`
}

// ReplicaQuotaStatus is where the quota is. Free = Offered * R, and what is left over by rounding.
type ReplicaQuotaStatus struct {
	Used     Amounts `json:"used"`
	Free     Amounts `json:"free"`
	Offered  Amounts `json:"offered"`
	Reserved Amounts `json:"reserved"`
	// GivenBack is, over all time, what had been held for copies that tasks turned out not to have.
	GivenBack Amounts `json:"givenBack"`
}

// Amounts are of what nodes have.
type Amounts struct {
	MilliCPU  int64 `json:"milliCPU"`
	MemoryMiB int64 `json:"memoryMiB"`
	DiskMiB   int64 `json:"diskMiB"`
}
