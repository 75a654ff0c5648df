package crds_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

const shop = `
apiVersion: dunlin.dev/v1alpha1
kind: ProtectedVM
metadata: { name: shop }
spec:
  strength: 2
  policy: dunlin
  vm:
    memoryMiB: 1024
    vcpus: 2
    disks: [ { path: /srv/shop.img } ]
    nics: [ { mac: "52:54:00:12:34:56", bridge: br0 } ]
`

const sessions = `
apiVersion: dunlin.dev/v1alpha1
kind: ProtectedProgram
metadata: { name: sessions }
spec:
  strength: 2
  policy: dunlin
  program:
    command: [ /var/lib/dunlin/programs/default/redis-server, --save, "" ]
    environment: { LANG: C }
    user: nobody
    port: 6379
    order: read
    memoryMiB: 256
    milliCPU: 500
    nics: [ { mac: "52:54:00:12:34:57", bridge: br0, address: 10.0.0.57/24, gateway: 10.0.0.1 } ]
`

const host = `
apiVersion: dunlin.dev/v1alpha1
kind: DunlinHost
metadata: { name: n1 }
spec: { memoryMiB: 4096, address: "10.0.0.1:7700" }
`

const quota = `
apiVersion: dunlin.dev/v1alpha1
kind: ReplicaQuota
metadata: { name: quota }
spec: { mostStrength: 2, memoryMiB: 4096 }
`

// mistakes are what a person gets wrong, and what is said of it.
var mistakes = []struct {
	what, manifest, from, to, says string
}{
	{"too many copies", shop, "strength: 2", "strength: 4", "strength is 1 (unprotected), 2 (a primary and a backup) or 3 (with a standby)"},
	{"no copies", shop, "strength: 2", "strength: 0", "spec.strength: Invalid value: \"integer\": strength is 1 (unprotected)"},
	{"a word for a number", shop, "strength: 2", "strength: two", `spec.strength: Invalid value: "string": spec.strength in body must be of type integer`},
	{"an unknown policy", shop, "policy: dunlin", "policy: raft", "policy is dunlin, plover, colo, str, remus or none, not raft"},
	{"two copies that nothing keeps alike", shop, "policy: dunlin", "policy: none", "strength 1 is policy none, and more copies need a policy"},
	{"one copy, protected", shop, "strength: 2", "strength: 1", "strength 1 is policy none, and more copies need a policy"},
	{"an unknown storage", shop, "policy: dunlin", "storage: nfs", "storage is gannet, colo or sync, not nfs"},
	{"no time until a standby gets a part", shop, "policy: dunlin", "standbyAfterSeconds: 0", "standbyAfterSeconds is from 1 to 86400 (a day)"},
	{"more than a day until then", shop, "policy: dunlin", "standbyAfterSeconds: 86401", "standbyAfterSeconds is from 1 to 86400 (a day)"},
	{"a word for that time", shop, "policy: dunlin", "standbyAfterSeconds: 30s", `spec.standbyAfterSeconds: Invalid value: "string": spec.standbyAfterSeconds in body must be of type integer`},
	{"a checkpoint all the time", shop, "policy: dunlin", "standbyCheckpointSeconds: 0", "standbyCheckpointSeconds is from 1 to 86400 (a day)"},
	{"no time until a program's standby gets a part", sessions, "strength: 2", "strength: 3\n  standbyAfterSeconds: 0", "standbyAfterSeconds is from 1 to 86400 (a day)"},
	{"more than a day until a program's does", sessions, "strength: 2", "strength: 3\n  standbyAfterSeconds: 86401", "standbyAfterSeconds is from 1 to 86400 (a day)"},
	{"an unknown part", shop, "vm:", "hardware:", `unknown field "spec.hardware"`},
	{"no hardware", shop, shop[strings.Index(shop, "  vm:"):], "", "spec.vm: Required value"},
	{"no memory", shop, "memoryMiB: 1024", "machine: pc", "spec.vm.memoryMiB: Required value"},
	{"too little memory", shop, "memoryMiB: 1024", "memoryMiB: 1", "memoryMiB is from 8 to 4194304 (4 TiB)"},
	{"a misspelt key", shop, "memoryMiB: 1024", "memoryMiB: 1024\n    memory: 1024", `unknown field "spec.vm.memory"`},
	{"no CPUs", shop, "vcpus: 2", "vcpus: 0", "vcpus is from 1 to 64"},
	{"nothing to boot", shop, "disks: [ { path: /srv/shop.img } ]", "disks: []", "the VM has nothing to boot: give it a disk, or a kernel"},
	{"an initrd without a kernel", shop, "vcpus: 2", "initrd: /boot/initrd", "initrd and append belong to a kernel, and there is none"},
	{"a microvm without a kernel", shop, "vcpus: 2", "machine: microvm", "a microvm boots a kernel directly, and there is none"},
	{"a microvm with a UEFI", shop, "vcpus: 2", "machine: microvm\n    kernel: /boot/k\n    firmware: uefi", "firmware uefi needs machine pc or q35"},
	{"an unknown machine", shop, "vcpus: 2", "machine: arm", "machine is pc, q35 or microvm, not arm"},
	{"a disk by a relative path", shop, "/srv/shop.img", "shop.img", "a disk's path is absolute, and the same on each node"},
	{"a disk twice", shop, "{ path: /srv/shop.img }", "{ path: /srv/shop.img }, { path: /srv/shop.img }", "two disks have the same path"},
	{"a disk of an unknown format", shop, "path: /srv/shop.img", "path: /srv/shop.img, format: vmdk", "a disk's format is raw or qcow2"},
	{"a mac that is none", shop, "52:54:00:12:34:56", "52-54-00-12-34-56", "a mac is one of a single card, as 52:54:00:12:34:56"},
	{"a mac of many cards", shop, "52:54:00:12:34:56", "53:54:00:12:34:56", "a mac is one of a single card, as 52:54:00:12:34:56"},
	{"a mac twice", shop, "bridge: br0 }", `bridge: br0 }, { mac: "52:54:00:12:34:56" }`, "two nics have the same mac"},
	{"a bridge that no kernel names so", shop, "br0", "a-bridge-with-a-long-name", "a bridge's name has 1 to 15 characters"},
	{"a long name", shop, "name: shop", "name: shop-" + strings.Repeat("x", 44), "a ProtectedVM's name has at most 48 characters"},
	{"a name that is none", shop, "name: shop", "name: Shop", "a lowercase RFC 1123 subdomain must consist of"},
	{"an address without a port", host, "10.0.0.1:7700", "10.0.0.1", "address is HOST:PORT, with a port from 1 to 65535"},
	{"a port that is none", host, "10.0.0.1:7700", "10.0.0.1:77000", "address is HOST:PORT, with a port from 1 to 65535"},
	{"a second quota", quota, "name: quota", "name: more", "a namespace has one ReplicaQuota, and its name is quota"},
	{"a quota for no copies", quota, "mostStrength: 2", "mostStrength: 0", "mostStrength is from 1 to 127"},
	{"a program alone", sessions, "strength: 2", "strength: 1", "strength of a program is 2 (a primary and a backup) or 3 (with a standby): daemons run no program alone"},
	{"another policy for a program", sessions, "policy: dunlin", "policy: remus", "policy of a program is dunlin, not remus"},
	{"storage of a program", sessions, "policy: dunlin", "storage: gannet", `unknown field "spec.storage"`},
	{"a program that is a VM", sessions, "program:", "vm:", `unknown field "spec.vm"`},
	{"no program", sessions, sessions[strings.Index(sessions, "  program:"):], "", "spec.program: Required value"},
	{"no command", sessions, `command: [ /var/lib/dunlin/programs/default/redis-server, --save, "" ]`, "tasks: 9", "spec.program.command: Required value"},
	{"an empty command", sessions, `[ /var/lib/dunlin/programs/default/redis-server, --save, "" ]`, "[]", "command begins with the executable's whole path"},
	{"a command that is looked for", sessions, "/var/lib/dunlin/programs/default/redis-server", "redis-server", "command begins with the executable's whole path"},
	{"a variable that is none", sessions, "LANG: C", "1LANG: C", "a variable's name has letters, digits and _"},
	{"a relative directory", sessions, "port: 6379", "directory: tmp", "directory is an absolute path, not tmp"},
	{"a relative root", sessions, "port: 6379", "root: srv", "root is an absolute path without .., such as /var/lib/dunlin/programs/default/redis, not srv"},
	{"a root that leads elsewhere", sessions, "port: 6379", "root: /srv/../etc", "root is an absolute path without .., such as /var/lib/dunlin/programs/default/redis, not /srv/../etc"},
	{"a root that leads up", sessions, "port: 6379", "root: /srv/..", "root is an absolute path without .."},
	{"the kernel's files as a root", sessions, "port: 6379", "root: /proc/1/root", "root is a directory with a program's files, and /proc, /sys and /dev are the kernel's"},
	{"a root with a colon", sessions, "port: 6379", "root: '/srv/a:b'", "root has no comma, colon or backslash"},
	{"a root with a backslash", sessions, "port: 6379", `root: '/srv/a\b'`, "root has no comma, colon or backslash"},
	{"a user by number", sessions, "user: nobody", `user: "0"`, "user is a user's name on each node, such as nobody, not 0"},
	{"a port of a program that is none", sessions, "6379", "70000", "port is from 1 to 65535"},
	{"an unknown order", sessions, "order: read", "order: sometimes", "order is auto, delivery, read, batch or answer, not sometimes"},
	{"no patience", sessions, "port: 6379", "patienceMilliseconds: 0", "patienceMilliseconds is from 1 to 10000"},
	{"nothing to write to", sessions, "port: 6379", "scratchMiB: 0", "scratchMiB is from 1 to 1048576 (1 TiB)"},
	{"a program with no limit of memory", sessions, "memoryMiB: 256", "tasks: 9", "spec.program.memoryMiB: Required value"},
	{"too little memory for a program", sessions, "memoryMiB: 256", "memoryMiB: 8", "memoryMiB is from 16 to 16777216 (16 TiB)"},
	{"too little processor", sessions, "milliCPU: 500", "milliCPU: 1", "milliCPU is from 10 to 4096000"},
	{"no tasks", sessions, "port: 6379", "tasks: 0", "tasks is from 1 to 4194304"},
	{"no time to start", sessions, "port: 6379", "startWithinSeconds: 0", "startWithinSeconds is from 1 to 3600"},
	{"no card", sessions, `nics: [ { mac: "52:54:00:12:34:57", bridge: br0, address: 10.0.0.57/24, gateway: 10.0.0.1 } ]`, "nics: []", "a program has one card"},
	{"two cards", sessions, "gateway: 10.0.0.1 }", `gateway: 10.0.0.1 }, { mac: "52:54:00:12:34:58", address: 10.0.0.58/24 }`, "a program has one card"},
	{"a program's mac of many cards", sessions, "52:54:00:12:34:57", "53:54:00:12:34:57", "a mac is one of a single card, as 52:54:00:12:34:56"},
	{"a program's bridge that is none", sessions, "br0", "a/b", "a bridge's name has 1 to 15 characters"},
	{"a card without an address", sessions, ", address: 10.0.0.57/24", "", "spec.program.nics[0].address: Required value"},
	{"an address without a network", sessions, "10.0.0.57/24", "10.0.0.57", "address is an IPv4 address and its network of 8 to 30 bits, as 10.0.0.57/24, not 10.0.0.57"},
	{"a network without room", sessions, "10.0.0.57/24", "10.0.0.57/31", "address is an IPv4 address and its network of 8 to 30 bits, as 10.0.0.57/24"},
	{"an address that is none", sessions, "10.0.0.57/24", "10.0.0.257/24", "address is an IPv4 address and its network of 8 to 30 bits, as 10.0.0.57/24"},
	{"a way to others that is none", sessions, "gateway: 10.0.0.1", `gateway: "fe80::1"`, "gateway is an IPv4 address, not fe80::1"},
	{"an MTU that no IPv4 has", sessions, "gateway: 10.0.0.1", "mtu: 500", "mtu is from 576 to 1500"},
	{"an unknown clock", sessions, "port: 6379", "clock: mine", "clock is agreed or own, not mine"},
	{"unknown chance", sessions, "port: 6379", "chance: good", "chance is agreed or own, not good"},
	{"an unknown restart", sessions, "port: 6379", "restart: sometimes", "restart is never, on-failure or always, not sometimes"},
	{"data without a place", sessions, "port: 6379", "data: /var/lib/dunlin/images/default/s.img", "data and dataAt belong together"},
	{"a place without data", sessions, "port: 6379", "dataAt: /var/lib/redis", "data and dataAt belong together"},
	{"the size of no data", sessions, "port: 6379", "dataMiB: 64", "dataMiB is for data"},
	{"relative data", sessions, "port: 6379", "dataAt: /var/lib/redis\n    data: s.img", "data is an absolute path, such as /var/lib/dunlin/images/default/sessions.img, not s.img"},
	{"data at the root", sessions, "port: 6379", "data: /s.img\n    dataAt: /", "dataAt is an absolute path, such as /var/lib/redis, not /"},
	{"data at the root by another name", sessions, "port: 6379", "data: /s.img\n    dataAt: /./", "dataAt is a directory below /, without .."},
	{"data at what leads elsewhere", sessions, "port: 6379", "data: /s.img\n    dataAt: /var/../etc", "dataAt is a directory below /, without .."},
	{"data at what leads up", sessions, "port: 6379", "data: /s.img\n    dataAt: /var/..", "dataAt is a directory below /, without .."},
	{"data among the kernel's files", sessions, "port: 6379", "data: /s.img\n    dataAt: /proc/x", "dataAt is not in /proc, /sys or /dev"},
	{"data in place of the kernel's files", sessions, "port: 6379", "data: /s.img\n    dataAt: /sys", "dataAt is not in /proc, /sys or /dev"},
	{"data among the kernel's files by another name", sessions, "port: 6379", "data: /s.img\n    dataAt: /.//dev/x", "dataAt is not in /proc, /sys or /dev"},
	{"data that leads elsewhere", sessions, "port: 6379", "data: /srv/../s.img\n    dataAt: /var/lib/redis", "data is a file by its path, without .."},
	{"data that cover themselves", sessions, "port: 6379", "data: /srv/data/s.img\n    dataAt: /srv", "data does not lie in dataAt"},
	{"data at their own file", sessions, "port: 6379", "data: /srv/s.img\n    dataAt: /srv/s.img/", "data does not lie in dataAt"},
	{"an option of QEMU's for a model", shop, "vcpus: 2", "cpu: -smp", "cpu is a model of QEMU's"},
	{"too little data", sessions, "port: 6379", "data: /s.img\n    dataAt: /var/lib/redis\n    dataMiB: 4", "dataMiB is from 8 to 65536 (64 GiB)"},
	{"a program's long name", sessions, "name: sessions", "name: sessions-" + strings.Repeat("x", 44), "a ProtectedProgram's name has at most 48 characters"},
	{"memory below nothing", host, "4096", "-1", "memoryMiB is from 0 to 1073741824 (1 PiB)"},
}

var (
	vms      = v1alpha1.Version.WithResource("protectedvms")
	programs = v1alpha1.Version.WithResource("protectedprograms")
	hosts    = v1alpha1.Version.WithResource("dunlinhosts")
)

func objectOf(t *testing.T, manifest string) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(manifest), &object.Object); err != nil {
		t.Fatalf("%v: %s", err, manifest)
	}
	return object
}

func resourceOf(client dynamic.Interface, object *unstructured.Unstructured) dynamic.ResourceInterface {
	if object.GetKind() == "DunlinHost" {
		return client.Resource(hosts)
	}
	if object.GetKind() == "ReplicaQuota" {
		return client.Resource(v1alpha1.Version.WithResource("replicaquotas")).Namespace("default")
	}
	if object.GetKind() == "ProtectedProgram" {
		return client.Resource(programs).Namespace("default")
	}
	return client.Resource(vms).Namespace("default")
}

// apply is what 'kubectl apply' asks of the server for an object that is not there yet.
func apply(ctx context.Context, t *testing.T, client dynamic.Interface, manifest string) (*unstructured.Unstructured, error) {
	t.Helper()
	object := objectOf(t, manifest)
	return resourceOf(client, object).Create(ctx, object, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict})
}

func TestResourcesOnARealServer(t *testing.T) {
	plane := lab.Begin(t)
	plane.Install(t)
	client, err := dynamic.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	t.Run("mistakes get one line", func(t *testing.T) { mistakesGetOneLine(ctx, t, client) })
	t.Run("defaults", func(t *testing.T) { defaults(ctx, t, client) })
	t.Run("changes", func(t *testing.T) { changes(ctx, t, client) })
	t.Run("columns", func(t *testing.T) { columns(ctx, t, client, plane.Config()) })
}

func mistakesGetOneLine(ctx context.Context, t *testing.T, client dynamic.Interface) {
	for _, mistake := range mistakes {
		if !strings.Contains(mistake.manifest, mistake.from) {
			t.Fatalf("%s: nothing to change", mistake.what)
		}
		_, err := apply(ctx, t, client, strings.Replace(mistake.manifest, mistake.from, mistake.to, 1))
		var status *apierrors.StatusError
		if !errors.As(err, &status) {
			t.Errorf("%s: it is taken, or fails otherwise: %v", mistake.what, err)
			continue
		}
		if testing.Verbose() {
			t.Logf("%s: %v", mistake.what, err)
		}
		// A second cause says at most that rules wait for this one to be mended.
		said := 0
		if status.ErrStatus.Details != nil {
			for _, cause := range status.ErrStatus.Details.Causes {
				if !strings.Contains(cause.Message, "some validation rules were not checked") {
					said++
				}
			}
		}
		if line := err.Error(); !strings.Contains(line, mistake.says) || strings.Contains(line, "\n") || said > 1 {
			t.Errorf("%s: %d causes: %s", mistake.what, said, line)
		}
	}
}

func defaults(ctx context.Context, t *testing.T, client dynamic.Interface) {
	made, err := apply(ctx, t, client, strings.NewReplacer("strength: 2", "", "policy: dunlin", "", "name: shop", "name: plain", "vcpus: 2", "").Replace(shop))
	if err != nil {
		t.Fatal(err)
	}
	data, err := made.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	var vm v1alpha1.ProtectedVM
	if err := json.Unmarshal(data, &vm); err != nil {
		t.Fatal(err)
	}
	if vm.Spec.Strength != 2 || vm.Spec.Policy != "dunlin" || vm.Spec.Storage != "gannet" || vm.Spec.VM.VCPUs != 1 || vm.Spec.StandbyAfterSeconds != 30 ||
		vm.Spec.VM.Machine != "pc" || vm.Spec.VM.Firmware != "bios" || vm.Spec.VM.Disks[0].Format != "raw" {
		t.Errorf("%+v", vm.Spec)
	}
	usual := strings.NewReplacer("strength: 2", "", "policy: dunlin", "", "name: sessions", "name: usual", "user: nobody", "", "order: read", "", "milliCPU: 500", "")
	made, err = apply(ctx, t, client, usual.Replace(sessions))
	if err != nil {
		t.Fatal(err)
	}
	var program v1alpha1.ProtectedProgram
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(made.Object, &program); err != nil {
		t.Fatal(err)
	}
	runs := program.Spec.Program
	if program.Spec.Strength != 2 || program.Spec.Policy != "dunlin" || program.Spec.StandbyAfterSeconds != 30 || runs.User != "nobody" || runs.Root != "/" || runs.Directory != "/" || runs.Order != "auto" ||
		runs.PatienceMilliseconds != 500 || runs.ScratchMiB != 256 || runs.MilliCPU != 1000 || runs.StartWithinSeconds != 30 ||
		runs.Clock != "agreed" || runs.Chance != "own" || runs.Restart != "never" || runs.Data != "" || runs.DataMiB != 0 {
		t.Errorf("%+v", program.Spec)
	}
}

func changes(ctx context.Context, t *testing.T, client dynamic.Interface) {
	if _, err := apply(ctx, t, client, shop); err != nil {
		t.Fatal(err)
	}
	if _, err := apply(ctx, t, client, sessions); err != nil {
		t.Fatal(err)
	}
	changeOf := func(of dynamic.ResourceInterface, name string, value any, path ...string) error {
		object, err := of.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if err := unstructured.SetNestedField(object.Object, value, path...); err != nil {
			return err
		}
		_, err = of.Update(ctx, object, metav1.UpdateOptions{FieldValidation: metav1.FieldValidationStrict})
		return err
	}
	change := func(value any, path ...string) error {
		return changeOf(client.Resource(vms).Namespace("default"), "shop", value, path...)
	}
	const stays = "a program does not change while it exists: make another one"
	err := changeOf(client.Resource(programs).Namespace("default"), "sessions", "root", "spec", "program", "user")
	if err == nil || !strings.Contains(err.Error(), stays) {
		t.Errorf("a changed program: %v", err)
	}
	if err := change(int64(3), "spec", "strength"); err != nil {
		t.Errorf("a changed strength is refused: %v", err)
	}
	if err := change("remus", "spec", "policy"); err != nil {
		t.Errorf("a changed policy is refused: %v", err)
	}
	const why = "the hardware of a VM does not change while it exists: make another one"
	if err := change(int64(2048), "spec", "vm", "memoryMiB"); err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("changed hardware: %v", err)
	}
	const sameTime = "standbyAfterSeconds does not change while the VM exists: make another one"
	if err := change(int64(60), "spec", "standbyAfterSeconds"); err == nil || !strings.Contains(err.Error(), sameTime) {
		t.Errorf("another time until the standby gets a part: %v", err)
	}
	const sameCheckpoint = "standbyCheckpointSeconds does not change while the VM exists: make another one"
	if err := change(int64(60), "spec", "standbyCheckpointSeconds"); err == nil || !strings.Contains(err.Error(), sameCheckpoint) {
		t.Errorf("checkpoints from now on: %v", err)
	}
	const programsTime = "standbyAfterSeconds does not change while the program exists: make another one"
	err = changeOf(client.Resource(programs).Namespace("default"), "sessions", int64(60), "spec", "standbyAfterSeconds")
	if err == nil || !strings.Contains(err.Error(), programsTime) {
		t.Errorf("another time until a program's standby gets a part: %v", err)
	}
	if err := change(int64(4), "spec", "strength"); err == nil {
		t.Error("a wrong strength is taken when it comes later")
	}
}

// columns are what 'kubectl get' shows: the server makes the table.
func columns(ctx context.Context, t *testing.T, client dynamic.Interface, config *rest.Config) {
	object, err := client.Resource(vms).Namespace("default").Get(ctx, "shop", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	now := metav1.Now().Rfc3339Copy().Format("2006-01-02T15:04:05Z07:00")
	object.Object["status"] = map[string]any{
		"state": "protected", "primary": "n1", "backup": "n2", "standby": "n4", "witness": "n3", "lastFailOver": now,
		"conditions": []any{map[string]any{"type": "Protected", "status": "True", "lastTransitionTime": now, "reason": "Synced", "message": "both copies run"}},
	}
	if _, err := client.Resource(vms).Namespace("default").UpdateStatus(ctx, object, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := apply(ctx, t, client, host); err != nil {
		t.Fatal(err)
	}
	names, cells := table(ctx, t, config, "/apis/dunlin.dev/v1alpha1/namespaces/default/protectedvms/shop")
	if names != "Name R State Primary Backup Standby Witness Protected Fail-over Age" || !strings.HasPrefix(cells, "shop 3 protected n1 n2 n4 n3 True ") {
		t.Errorf("%s\n%s", names, cells)
	}
	names, cells = table(ctx, t, config, "/apis/dunlin.dev/v1alpha1/namespaces/default/protectedprograms/sessions")
	if names != "Name R State Primary Backup Standby Witness Protected Fail-over Age" || !strings.HasPrefix(cells, "sessions 2 ") {
		t.Errorf("%s\n%s", names, cells)
	}
	names, cells = table(ctx, t, config, "/apis/dunlin.dev/v1alpha1/dunlinhosts/n1")
	if names != "Name Ready Copies KVM Memory Disk Version Heard Age" || !strings.HasPrefix(cells, "n1 <none> true <none> 4096 ") {
		t.Errorf("%s\n%s", names, cells)
	}
}

// table returns the columns' names and the first row.
func table(ctx context.Context, t *testing.T, config *rest.Config, path string) (names, cells string) {
	t.Helper()
	config = rest.CopyConfig(config)
	config.GroupVersion = &v1alpha1.Version
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	client, err := rest.RESTClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	data, err := client.Get().AbsPath(path).SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").DoRaw(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var rows metav1.Table
	if err := json.Unmarshal(data, &rows); err != nil || len(rows.Rows) != 1 {
		t.Fatalf("%v: %s", err, data)
	}
	for _, column := range rows.ColumnDefinitions {
		names = strings.TrimSpace(names + " " + column.Name)
	}
	for _, cell := range rows.Rows[0].Cells {
		text, err := json.Marshal(cell)
		if err != nil {
			t.Fatal(err)
		}
		shown := strings.Trim(string(text), `"`)
		if cell == nil {
			shown = "<none>"
		}
		cells = strings.TrimSpace(cells + " " + shown)
	}
	return names, cells
}
