package operator

import (
	"fmt"
	"path"
	"strings"

	"github.com/BurntSushi/toml"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// Limits are what a host's administrator lets ProtectedVMs and ProtectedPrograms have of it. A daemon opens images as root and runs programs as any user, so
// that without them whoever may make such an object could read every file of the host.
type Limits struct {
	// Images is the folder with a folder for each namespace: kernels, initrds and disks of a namespace's VMs lie in its own.
	Images string
	// Programs is the folder with a folder for each namespace: executables of a namespace's programs lie in its own.
	Programs string
	// Users are those as whom programs may run. Who has root's number is none of them, unless root is named.
	Users []string
	// Bridges are those that cards may join.
	Bridges []string
}

// file is a VM's file, as the daemon reads it.
type file struct {
	Name    string   `toml:"name"`
	Members []string `toml:"members"`
	Witness string   `toml:"witness,omitempty"`
	Standby string   `toml:"standby,omitempty"`
	// StandbyAfter is said without a standby too: one may be named while the VM runs.
	StandbyAfter string `toml:"standby_after,omitempty"`
	// StandbyCheckpoint likewise.
	StandbyCheckpoint string    `toml:"standby_checkpoint,omitempty"`
	Policy            string    `toml:"policy"`
	Storage           string    `toml:"storage,omitempty"`
	VM                *hardware `toml:"vm,omitempty"`
	Program           *program  `toml:"program,omitempty"`
}

type hardware struct {
	MemoryMiB int64  `toml:"memory_mib"`
	VCPUs     int    `toml:"vcpus,omitzero"`
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

// File returns the file of an object that is placed, or an error that says what it may not have on this host.
func (limits Limits) File(object v1alpha1.Protected) (string, error) {
	placement := object.Seen().Placement
	written := file{
		Name: NameOnHosts(object), Members: placement.Members, Witness: placement.Witness, Standby: placement.Standby, Policy: object.Asked().Policy,
		Storage: placement.Storage,
	}
	var err error
	var seconds int64
	switch object := object.(type) {
	case *v1alpha1.ProtectedVM:
		written.VM, err, seconds = hardwareOf(object.Spec.VM), limits.check(object), object.Spec.StandbyAfterSeconds
		if every := object.Spec.StandbyCheckpointSeconds; every > 0 {
			written.StandbyCheckpoint = fmt.Sprintf("%ds", every)
		}
	case *v1alpha1.ProtectedProgram:
		written.Program, err, seconds = programOf(object.Spec.Program), limits.checkProgram(object), object.Spec.StandbyAfterSeconds
	}
	if seconds > 0 {
		written.StandbyAfter = fmt.Sprintf("%ds", seconds)
	}
	if err != nil {
		return "", err
	}
	text, err := toml.Marshal(written)
	return string(text), err
}

func hardwareOf(spec v1alpha1.VM) *hardware {
	written := &hardware{
		MemoryMiB: spec.MemoryMiB, VCPUs: spec.VCPUs, Machine: spec.Machine, Firmware: spec.Firmware, Accel: spec.Accel, CPU: spec.CPU,
		Kernel: spec.Kernel, Initrd: spec.Initrd, Append: spec.Append,
	}
	for _, one := range spec.Disks {
		written.Disks = append(written.Disks, disk(one))
	}
	for _, one := range spec.NICs {
		written.NICs = append(written.NICs, nic(one))
	}
	return written
}

func (limits Limits) check(vm *v1alpha1.ProtectedVM) error {
	paths := []string{vm.Spec.VM.Kernel, vm.Spec.VM.Initrd}
	for _, disk := range vm.Spec.VM.Disks {
		paths = append(paths, disk.Path)
	}
	for _, one := range paths {
		if own := own(limits.Images, vm.Namespace); one != "" && !isIn(one, own) {
			return fmt.Errorf("%s may not be used: kernels, initrds and disks of namespace '%s' lie in %s", one, vm.Namespace, own)
		}
	}
	for _, nic := range vm.Spec.VM.NICs {
		if err := limits.checkBridge(nic.Bridge); err != nil {
			return err
		}
	}
	return nil
}

func (limits Limits) checkBridge(bridge string) error {
	if bridge != "" && !has(limits.Bridges, bridge) {
		return fmt.Errorf("bridge '%s' may not be used on this host: its operator lets cards join %s", bridge, either(limits.Bridges))
	}
	return nil
}

// own is a namespace's folder in one that has a folder for each.
func own(folder, namespace string) string { return path.Join(folder, namespace) + "/" }

// isIn says whether a path leads into a folder, by its name alone: where links lead is the choice of who fills the folder.
func isIn(one, folder string) bool { return path.Clean(one) == one && strings.HasPrefix(one, folder) }

func either(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return "'" + strings.Join(names, "', '") + "'"
}
