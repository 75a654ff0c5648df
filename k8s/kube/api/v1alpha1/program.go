package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// ProtectedProgram is a server program without a VM that runs as copies on different nodes.
//
// +kubebuilder:object:root=true
type ProtectedProgram struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ProtectedProgramSpec `json:"spec"`
	Status            ProtectedStatus      `json:"status,omitempty"`
}

// ProtectedProgramSpec is what is wanted.
type ProtectedProgramSpec struct {
	// Strength is R: how many copies run, each on a node of its own.
	Strength int `json:"strength,omitempty"`
	// Policy is how the copies are kept alike.
	Policy string `json:"policy,omitempty"`
	// StandbyAfterSeconds is how long a copy's host has to be away until the standby gets its part. It does not change.
	StandbyAfterSeconds int64   `json:"standbyAfterSeconds,omitempty"`
	Program             Program `json:"program"`
}

// Program is what runs. It does not change.
type Program struct {
	// Command is the executable by its whole path, and its arguments.
	Command []string `json:"command"`
	// Root is the directory of each node that the copies see as their root; / is the node's own.
	Root string `json:"root,omitempty"`
	// Directory is where it starts.
	Directory string `json:"directory,omitempty"`
	// Environment is all of its environment, but for a usual PATH.
	Environment map[string]string `json:"environment,omitempty"`
	// User is whom it runs as, on each node.
	User string `json:"user,omitempty"`
	// Port is the TCP port whose listening says that it serves; any, if it is left out.
	Port int `json:"port,omitempty"`
	// Order is what the next input waits for, and PatienceMilliseconds how long it does.
	Order                string `json:"order,omitempty"`
	PatienceMilliseconds int64  `json:"patienceMilliseconds,omitempty"`
	// Clock and Chance say where time and chance come from: agreed, or own.
	Clock  string `json:"clock,omitempty"`
	Chance string `json:"chance,omitempty"`
	// Data is a file on each node, with a file system of DataMiB that outlives the copies, which see it at DataAt.
	Data    string `json:"data,omitempty"`
	DataAt  string `json:"dataAt,omitempty"`
	DataMiB int64  `json:"dataMiB,omitempty"`
	// ScratchMiB is what each copy may write to files, in memory.
	ScratchMiB int64 `json:"scratchMiB,omitempty"`
	// MemoryMiB, MilliCPU and Tasks bound each copy; a Pod holds the first two for it.
	MemoryMiB int64 `json:"memoryMiB"`
	MilliCPU  int64 `json:"milliCPU,omitempty"`
	Tasks     int64 `json:"tasks,omitempty"`
	// StartWithinSeconds is how long it may take until it serves.
	StartWithinSeconds int64 `json:"startWithinSeconds,omitempty"`
	// Restart says whether it is begun again when it has ended in all copies.
	Restart string       `json:"restart,omitempty"`
	NICs    []ProgramNIC `json:"nics"`
}

// ProgramNIC is a program's network card.
type ProgramNIC struct {
	MAC    string `json:"mac"`
	Bridge string `json:"bridge,omitempty"`
	// Address is the program's, with its network's bits.
	Address string `json:"address"`
	// Gateway is the way to other networks.
	Gateway string `json:"gateway,omitempty"`
	// MTU is the most bytes of a packet, where the network takes fewer than 1500.
	MTU int64 `json:"mtu,omitempty"`
}
