package deploy_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// overlay is what docs/kubernetes.md has a stranger apply.
const overlay = "overlays/example"

// What 'kubectl apply -k' gives a cluster that knows nothing of Dunlin is accepted by the server, all of it, and again without a change; and what its Pods name is there.
func TestKubectlAppliesAllThatAClusterNeeds(t *testing.T) {
	plane := lab.Begin(t)
	rendered, err := plane.Kubectl(t, "kustomize", overlay)
	if err != nil {
		t.Fatalf("%v: %s", err, rendered)
	}
	count := len(lab.Objects(t, []byte(rendered)))
	var created []string
	for _, word := range []string{"created", "unchanged"} {
		said, err := plane.Kubectl(t, "apply", "-k", overlay)
		if err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		lines := strings.Split(strings.TrimSpace(said), "\n")
		if len(lines) != count {
			t.Errorf("there are %d objects: %s", count, said)
		}
		for _, line := range lines {
			if !strings.HasSuffix(line, " "+word) {
				t.Errorf("not %s: %s", word, line)
			}
			created = append(created, strings.Fields(line)[0])
		}
	}
	for _, one := range []string{
		"customresourcedefinition.apiextensions.k8s.io/protectedvms.dunlin.dev", "customresourcedefinition.apiextensions.k8s.io/protectedprograms.dunlin.dev",
		"customresourcedefinition.apiextensions.k8s.io/dunlinhosts.dunlin.dev", "customresourcedefinition.apiextensions.k8s.io/replicaquotas.dunlin.dev",
		"validatingadmissionpolicybinding.admissionregistration.k8s.io/dunlin-finalizer",
		"validatingadmissionpolicybinding.admissionregistration.k8s.io/dunlin-operator-pods",
		"validatingadmissionpolicybinding.admissionregistration.k8s.io/dunlin-claims",
		"validatingadmissionpolicybinding.admissionregistration.k8s.io/dunlin-scheduler-pods", "clusterrolebinding.rbac.authorization.k8s.io/dunlin-operator",
		"clusterrolebinding.rbac.authorization.k8s.io/dunlin-scheduler", "daemonset.apps/dunlin-operator", "daemonset.apps/dunlin-scheduler", "priorityclass.scheduling.k8s.io/dunlin-copy",
	} {
		if !slices.Contains(created, one) {
			t.Errorf("%s is not there: %v", one, created)
		}
	}
	client, err := kubernetes.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"dunlin-operator", "dunlin-scheduler"} {
		set, err := client.AppsV1().DaemonSets("dunlin-system").Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		whole(t, client, set)
	}
}

// whole says whether all that a set's Pods name is there: they would wait for it, or begin and end again and again.
func whole(t *testing.T, client kubernetes.Interface, set *apps.DaemonSet) {
	t.Helper()
	ctx := context.Background()
	pod := set.Spec.Template.Spec
	if _, err := client.CoreV1().ServiceAccounts(set.Namespace).Get(ctx, pod.ServiceAccountName, metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	maps := func(name string) map[string]string {
		data, err := client.CoreV1().ConfigMaps(set.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return data.Data
	}
	paths := map[string]string{}
	for _, volume := range pod.Volumes {
		if volume.ConfigMap != nil && len(maps(volume.ConfigMap.Name)) == 0 {
			t.Errorf("%s: %s has nothing in it", set.Name, volume.ConfigMap.Name)
		}
		if volume.HostPath != nil {
			paths[volume.Name] = volume.HostPath.Path
		}
	}
	one := pod.Containers[0]
	if want := "dunlin.dev/" + set.Name + ":" + treesVersion(t); one.Image != want {
		t.Errorf("image %s, and 'cargo xtask k8s images' makes %s", one.Image, want)
	}
	for _, mount := range one.VolumeMounts {
		if path := paths[mount.Name]; path != "" && path != mount.MountPath {
			t.Errorf("%s: %s is %s in it, and what objects name is looked at by its path on the node", set.Name, path, mount.MountPath)
		}
	}
	// What a kubelet does with arguments.
	values := map[string]string{}
	for _, from := range one.EnvFrom {
		for key, value := range maps(from.ConfigMapRef.Name) {
			values[key] = value
		}
	}
	for _, variable := range one.Env {
		if from := variable.ValueFrom; from != nil && from.FieldRef != nil && from.FieldRef.FieldPath == "metadata.namespace" {
			values[variable.Name] = set.Namespace
		}
	}
	var arguments []string
	for _, argument := range one.Args {
		arguments = append(arguments, regexp.MustCompile(`\$\(([A-Z_]+)\)`).ReplaceAllStringFunc(argument, func(variable string) string {
			value, known := values[variable[2:len(variable)-1]]
			if !known {
				t.Errorf("%s: nobody says what %s is", set.Name, variable)
			}
			return value
		}))
	}
	if set.Name != "dunlin-operator" {
		// Its file is the one that all tests with schedulers have.
		return
	}
	if values["BRIDGES"] != "br0" || values["USERS"] != "nobody" || values["PAUSE"] != "dunlin.dev/dunlin-pause:"+treesVersion(t) {
		t.Errorf("the overlay's and the base's values: %v", values)
	}
	// It reads all of its arguments before it says its version.
	said, err := exec.Command(lab.Operator(t), append(arguments, "--version")...).CombinedOutput()
	if err != nil || !bytes.HasPrefix(said, []byte("dunlin-operator ")) {
		t.Errorf("dunlin-operator %v: %v: %s", arguments, err, said)
	}
	for _, variable := range one.Env {
		if variable.Name == "NODE_NAME" && variable.ValueFrom != nil && *variable.ValueFrom.FieldRef == (v1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "spec.nodeName"}) {
			return
		}
	}
	t.Error("nobody says which node's operator it is")
}

// An overlay that puts all of it into another namespace leaves nothing where it was: no binding, no account, no file.
func TestANamespaceOfOnesOwnHasAllOfIt(t *testing.T) {
	base, err := filepath.Abs(overlay)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	// From a folder behind a link a relative path would lead elsewhere.
	if folder, err = filepath.EvalSymlinks(folder); err != nil {
		t.Fatal(err)
	}
	if base, err = filepath.Rel(folder, base); err != nil {
		t.Fatal(err)
	}
	own := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: ours\nresources: [ " + base + " ]\n"
	if err := os.WriteFile(filepath.Join(folder, "kustomization.yaml"), []byte(own), 0o600); err != nil {
		t.Fatal(err)
	}
	said, err := exec.Command(lab.Tool(t, "kubectl"), "kustomize", folder).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	for number, line := range strings.Split(string(said), "\n") {
		if strings.Contains(line, "dunlin-system") {
			t.Errorf("line %d is of another namespace: %s", number+1, line)
		}
	}
	if !strings.Contains(string(said), "--namespace=$(NAMESPACE)") || len(lab.Objects(t, said)) == 0 {
		t.Errorf("operators elect one of them in another namespace: %s", said)
	}
}

// treesVersion is what images are tagged with.
func treesVersion(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../../Cargo.toml")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^version = "(.+)"$`).FindSubmatch(text)
	if found == nil {
		t.Fatal("the tree has no version")
	}
	return string(found[1])
}
