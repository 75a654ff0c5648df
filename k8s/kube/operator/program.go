package operator

import (
	"fmt"
	"os/user"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// program is a program's part of its file.
type program struct {
	Command      []string          `toml:"command"`
	Root         string            `toml:"root,omitempty"`
	Directory    string            `toml:"directory,omitempty"`
	Environment  map[string]string `toml:"environment,omitempty"`
	User         string            `toml:"user"`
	Port         int               `toml:"port,omitzero"`
	Order        string            `toml:"order,omitempty"`
	PatienceMs   int64             `toml:"patience_ms,omitzero"`
	Clock        string            `toml:"clock,omitempty"`
	Chance       string            `toml:"chance,omitempty"`
	Data         string            `toml:"data,omitempty"`
	DataAt       string            `toml:"data_at,omitempty"`
	DataMiB      int64             `toml:"data_mib,omitzero"`
	ScratchMiB   int64             `toml:"scratch_mib,omitzero"`
	MemoryMiB    int64             `toml:"memory_mib"`
	CPUs         float64           `toml:"cpus"`
	Tasks        int64             `toml:"tasks,omitzero"`
	StartWithinS int64             `toml:"start_within_s,omitzero"`
	Restart      string            `toml:"restart,omitempty"`
	NICs         []programNIC      `toml:"nics"`
}

type programNIC struct {
	MAC     string `toml:"mac"`
	Bridge  string `toml:"bridge,omitempty"`
	Address string `toml:"address"`
	Gateway string `toml:"gateway,omitempty"`
	MTU     int64  `toml:"mtu,omitzero"`
}

func programOf(spec v1alpha1.Program) *program {
	written := &program{
		Command: spec.Command, Root: spec.Root, Directory: spec.Directory, Environment: spec.Environment, User: spec.User, Port: spec.Port, Order: spec.Order,
		PatienceMs: spec.PatienceMilliseconds, ScratchMiB: spec.ScratchMiB, MemoryMiB: spec.MemoryMiB, CPUs: float64(spec.MilliCPU) / 1000,
		Tasks: spec.Tasks, StartWithinS: spec.StartWithinSeconds, Restart: spec.Restart,
		Clock: spec.Clock, Chance: spec.Chance, Data: spec.Data, DataAt: spec.DataAt, DataMiB: spec.DataMiB,
	}
	for _, one := range spec.NICs {
		written.NICs = append(written.NICs, programNIC(one))
	}
	return written
}

// checkProgram says what a program may not have on this host. It sees the host's files, as the user that it runs as: so what matters is who that is, and
// root is it nowhere unless the administrator named root, by any name that has root's number. One with a root directory of its own sees what is in that, and
// its executable is: so the directory is the namespace's, and not the executable's path.
func (limits Limits) checkProgram(object *v1alpha1.ProtectedProgram) error {
	spec, programs, images := object.Spec.Program, own(limits.Programs, object.Namespace), own(limits.Images, object.Namespace)
	ownRoot := spec.Root != "" && spec.Root != "/"
	if ownRoot && !isIn(spec.Root, programs) {
		return fmt.Errorf("%s may not be a program's root: root directories of namespace '%s', or links to them, lie in %s", spec.Root, object.Namespace, programs)
	}
	if len(spec.Command) == 0 || !ownRoot && !isIn(spec.Command[0], programs) {
		return fmt.Errorf("the command may not be run: executables of namespace '%s', or links to them, lie in %s", object.Namespace, programs)
	}
	if !has(limits.Users, spec.User) {
		return fmt.Errorf("a program may not run as user '%s' on this host: its operator lets programs run as %s", spec.User, either(limits.Users))
	}
	account, err := user.Lookup(spec.User)
	if err != nil {
		return fmt.Errorf("user '%s' is not on this host", spec.User)
	}
	if err := mayBe(account, limits.Users); err != nil {
		return err
	}
	// A daemon makes it, and opens it, as root.
	if spec.Data != "" && !isIn(spec.Data, images) {
		return fmt.Errorf("%s may not be used: images of namespace '%s' lie in %s", spec.Data, object.Namespace, images)
	}
	for _, nic := range spec.NICs {
		if err := limits.checkBridge(nic.Bridge); err != nil {
			return err
		}
	}
	return nil
}

// mayBe says that an account with root's number is root, whatever its name.
func mayBe(account *user.User, users []string) error {
	if account.Uid == "0" && !has(users, "root") {
		return fmt.Errorf("user '%s' is root by another name, and the operator on this host lets no program run as root", account.Username)
	}
	return nil
}
