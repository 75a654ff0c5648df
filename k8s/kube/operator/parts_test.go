package operator

import (
	"math/rand"
	"strings"
	"testing"
	"time"

	"github.com/BurntSushi/toml"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

func shop() *v1alpha1.ProtectedVM {
	return &v1alpha1.ProtectedVM{
		ObjectMeta: metav1.ObjectMeta{Name: "shop", Namespace: "shops", UID: "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"},
		Spec:       v1alpha1.ProtectedVMSpec{Strength: 2, Policy: "dunlin", Storage: "gannet", VM: v1alpha1.VM{MemoryMiB: 64, Kernel: "/images/shops/k"}},
		Status: v1alpha1.ProtectedVMStatus{Placement: &v1alpha1.Placement{
			Members: []string{"a", "b"}, Witness: "c", Strength: 2, Storage: "gannet",
		}},
	}
}

var limits = Limits{Images: "/images", Bridges: []string{"br0"}}

// Whatever a person writes into a string stays in it: nothing of it becomes another key of the file.
func TestAFileSaysWhatTheObjectSays(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewSource(seed))
	letters := []rune("a\"'\\\n\r\t#[]={}$\u00e9\u2028\x00\x1f\x7f ")
	for try := 0; try < 300; try++ {
		var text strings.Builder
		for length := random.Intn(12); length >= 0; length-- {
			text.WriteRune(letters[random.Intn(len(letters))])
		}
		vm := shop()
		vm.Spec.VM.Append, vm.Spec.VM.CPU = text.String(), text.String()
		vm.Spec.VM.Disks = []v1alpha1.Disk{{Path: "/images/shops/one two\"", Format: "raw"}}
		vm.Spec.VM.NICs = []v1alpha1.NIC{{MAC: "52:54:00:12:34:56", Bridge: "br0"}}
		written, err := limits.File(vm)
		if err != nil {
			t.Fatalf("%q: %v", text.String(), err)
		}
		var read file
		known, err := toml.Decode(written, &read)
		if err != nil || len(known.Undecoded()) > 0 {
			t.Fatalf("%q: %v, %v: %s", text.String(), err, known.Undecoded(), written)
		}
		if read.VM.Append != text.String() || read.VM.CPU != text.String() || read.Name != "shop.0a1b2c3d4e5f" || read.Witness != "c" || len(read.Members) != 2 ||
			read.VM.Disks[0].Path != "/images/shops/one two\"" || read.VM.NICs[0].Bridge != "br0" || read.VM.MemoryMiB != 64 {
			t.Fatalf("%q: %+v", text.String(), read)
		}
	}
}

func TestANamespaceHasItsOwnImages(t *testing.T) {
	for path, may := range map[string]bool{
		"/images/shops/k": true, "/images/shops/more/k": true, "/images/shops": false, "/images/shops/": false, "/images/others/k": false, "/images/k": false,
		"/images/shops/../others/k": false, "/images/shops/./k": false, "/images/shops-of-others/k": false, "/dev/sda": false, "//images/shops/k": false,
	} {
		kernel, initrd, disk := shop(), shop(), shop()
		kernel.Spec.VM.Kernel, initrd.Spec.VM.Initrd, disk.Spec.VM.Disks = path, path, []v1alpha1.Disk{{Path: path}}
		for _, vm := range []*v1alpha1.ProtectedVM{kernel, initrd, disk} {
			if _, err := limits.File(vm); (err == nil) != may {
				t.Errorf("%s: allowed is %v; it said: %v", path, may, err)
			}
		}
	}
}

func TestNamesFitAndTellObjectsApart(t *testing.T) {
	long := shop()
	long.Name = strings.Repeat("x", 48)
	if name := VMName(long); len(name) > 64 {
		t.Errorf("%s has %d characters", name, len(name))
	}
	anew := shop()
	anew.UID = types.UID("ffffffff-4e5f-6071-8293-a4b5c6d7e8f9")
	if VMName(anew) == VMName(shop()) {
		t.Error("an object that is made again is taken for the one before")
	}
}

// A deleted object goes when nobody can serve its VM any more, and no host that is heard has any of it.
func TestADeletedObjectWaitsForAMajority(t *testing.T) {
	for _, one := range []struct {
		gone, heard, says string
	}{
		{"", "abc", "is being ended on host 'a' and 'b' and 'c'"}, {"ab", "abc", "is being ended on host 'c'"}, {"abc", "abc", ""}, {"ab", "ab", ""}, {"bc", "bc", ""},
		{"a", "a", "'b' and 'c' cannot be asked"}, {"", "", "cannot be asked"}, {"abc", "", ""}, {"a", "ab", "is being ended on host 'b'"},
	} {
		vm, hosts := shop(), map[string]*v1alpha1.DunlinHost{}
		for _, name := range vm.Status.Placement.Hosts() {
			host := &v1alpha1.DunlinHost{}
			set(&host.Status.Conditions, 1, Ready, truth(strings.Contains(one.heard, name)), "Test", "")
			if hosts[name] = host; strings.Contains(one.gone, name) {
				vm.Status.Gone = append(vm.Status.Gone, name)
			}
		}
		if said := holdUp(vm, hosts); (said == "") != (one.says == "") || !strings.Contains(said, one.says) {
			t.Errorf("gone '%s', heard '%s': '%s', not '%s'", one.gone, one.heard, said, one.says)
		}
	}
	alone := shop()
	alone.Status.Placement = &v1alpha1.Placement{Members: []string{"a"}, Strength: 1}
	if holdUp(alone, nil) == "" {
		t.Error("the only host has it still, and is not heard")
	}
}

func TestReasonsAreSpeltAsKubernetesDoes(t *testing.T) {
	for word, want := range map[string]string{"took-over": "TookOver", "protected": "Protected", "no-majority": "NoMajority", "": "Unknown", "stalled": "Stalled"} {
		if got := reason(word); got != want {
			t.Errorf("%s is %s", word, got)
		}
	}
}
