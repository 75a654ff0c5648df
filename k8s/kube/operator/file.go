package operator

import (
	"fmt"
	"path"
	"strings"

	"github.com/BurntSushi/toml"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// Limits are what a host's administrator lets ProtectedVMs have of it. A daemon opens images as root, so that without them whoever may make a
// ProtectedVM could read every file of the host.
type Limits struct {
	// Images is the folder with a folder for each namespace: kernels, initrds and disks of a namespace's VMs lie in its own.
	Images string
	// Bridges are those that cards may join.
	Bridges []string
}

// file is a VM's file, as the daemon reads it.
type file struct {
	Name    string   `toml:"name"`
	Members []string `toml:"members"`
	Witness string   `toml:"witness,omitempty"`
	Policy  string   `toml:"policy"`
	Storage string   `toml:"storage,omitempty"`
	VM      hardware `toml:"vm"`
}

type hardware struct {
	MemoryMiB int64  `toml:"memory_mib"`
	VCPUs     int    `toml:"vcpus,omitempty"`
	Machine   string `toml:"machine,omitempty"`
	Firmware  string `toml:"firmware,omitempty"`
	Accel     string `toml:"accel,omitempty"`
	CPU       string `toml:"cpu,omitempty"`
	Kernel    string `toml:"kernel,omitempty"`
	Initrd    string `toml:"initrd,omitempty"`
	Append    string `toml:"append,omitempty"`
	Disks     []disk `toml:"disks,omitempty"`
	NICs      []nic  `toml:"nics,omitempty"`
}

type disk struct {
	Path   string `toml:"path"`
	Format string `toml:"format,omitempty"`
}

type nic struct {
	MAC    string `toml:"mac"`
	Bridge string `toml:"bridge,omitempty"`
}

// File returns the file of a ProtectedVM that is placed, or an error that says what it may not have on this host.
func (limits Limits) File(vm *v1alpha1.ProtectedVM) (string, error) {
	if err := limits.check(vm); err != nil {
		return "", err
	}
	placement, spec := vm.Status.Placement, vm.Spec.VM
	written := file{
		Name: VMName(vm), Members: placement.Members, Witness: placement.Witness, Policy: vm.Spec.Policy, Storage: placement.Storage,
		VM: hardware{
			MemoryMiB: spec.MemoryMiB, VCPUs: spec.VCPUs, Machine: spec.Machine, Firmware: spec.Firmware, Accel: spec.Accel, CPU: spec.CPU,
			Kernel: spec.Kernel, Initrd: spec.Initrd, Append: spec.Append,
		},
	}
	for _, one := range spec.Disks {
		written.VM.Disks = append(written.VM.Disks, disk(one))
	}
	for _, one := range spec.NICs {
		written.VM.NICs = append(written.VM.NICs, nic(one))
	}
	text, err := toml.Marshal(written)
	return string(text), err
}

func (limits Limits) check(vm *v1alpha1.ProtectedVM) error {
	own := path.Join(limits.Images, vm.Namespace) + "/"
	paths := []string{vm.Spec.VM.Kernel, vm.Spec.VM.Initrd}
	for _, disk := range vm.Spec.VM.Disks {
		paths = append(paths, disk.Path)
	}
	for _, one := range paths {
		if one != "" && (path.Clean(one) != one || !strings.HasPrefix(one, own)) {
			return fmt.Errorf("%s may not be used: kernels, initrds and disks of namespace '%s' lie in %s", one, vm.Namespace, own)
		}
	}
	for _, nic := range vm.Spec.VM.NICs {
		if nic.Bridge != "" && !has(limits.Bridges, nic.Bridge) {
			return fmt.Errorf("bridge '%s' may not be used on this host: its operator lets cards join %s", nic.Bridge, either(limits.Bridges))
		}
	}
	return nil
}

func either(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return "'" + strings.Join(names, "', '") + "'"
}
