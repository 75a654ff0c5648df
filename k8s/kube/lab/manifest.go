package lab

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"dunlin.dev/k8s/kube/deploy"
	"dunlin.dev/log/testbed"
)

// Objects are those of a manifest, in its order.
func Objects(t testing.TB, manifest []byte) (objects []*unstructured.Unstructured) {
	t.Helper()
	reader := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(manifest), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := reader.Decode(&object.Object); errors.Is(err, io.EOF) {
			return objects
		} else if err != nil {
			t.Fatal(err)
		}
		objects = append(objects, object)
	}
}

// Apply makes all objects of a manifest, as an administrator's 'kubectl create' does.
func (plane *Plane) Apply(t testing.TB, manifest []byte) {
	t.Helper()
	client, err := dynamic.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	served, err := discovery.NewDiscoveryClientForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	kinds := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(served))
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	for _, object := range Objects(t, manifest) {
		kind := object.GroupVersionKind()
		mapping, err := kinds.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			t.Fatal(err)
		}
		options := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
		if _, err := client.Resource(mapping.Resource).Namespace(object.GetNamespace()).Create(ctx, object, options); err != nil {
			t.Fatalf("%s '%s': %v", kind.Kind, object.GetName(), err)
		}
	}
}

// Kubectl runs the real one, as an administrator, and returns what it says.
func (plane *Plane) Kubectl(t testing.TB, arguments ...string) (string, error) {
	t.Helper()
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	command := exec.CommandContext(ctx, Tool(t, "kubectl"), append([]string{"--kubeconfig", plane.Kubeconfig(t, "kubectl", plane.Address())}, arguments...)...)
	// Its caches are the test's.
	command.Env = append(os.Environ(), "HOME="+t.TempDir())
	out, err := command.CombinedOutput()
	return string(out), err
}

// Account is a service account of Dunlin's.
type Account string

const (
	// OperatorAccount is that of operators.
	OperatorAccount Account = "dunlin-operator"
	// SchedulerAccount is that of schedulers.
	SchedulerAccount Account = "dunlin-scheduler"
)

// Rights gives accounts and users what they may do, as 'kubectl apply -k' does, and waits until the server knows of it.
func (plane *Plane) Rights(t testing.TB) {
	t.Helper()
	plane.Apply(t, deploy.RBAC)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	for _, account := range []Account{OperatorAccount, SchedulerAccount} {
		client, err := kubernetes.NewForConfig(plane.As("system:serviceaccount:dunlin-system:"+string(account), "system:authenticated"))
		if err != nil {
			t.Fatal(err)
		}
		testbed.Until(t, string(account)+" has its rights", func() error {
			_, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{Limit: 1})
			return err
		})
	}
}

// As is somebody else's config: the server judges what they ask by their own rights.
func (plane *Plane) As(user string, groups ...string) *rest.Config {
	config := plane.Config()
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	return config
}

// KubeconfigAs writes one with which a program is a service account, for a server at this address.
func (plane *Plane) KubeconfigAs(t testing.TB, name, address string, account Account) string {
	t.Helper()
	path := plane.Kubeconfig(t, name, address)
	config, err := clientcmd.LoadFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, who := range config.AuthInfos {
		impersonate(who, "dunlin-system", string(account))
	}
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	return path
}

func impersonate(who *clientcmdapi.AuthInfo, namespace, account string) {
	who.Impersonate = "system:serviceaccount:" + namespace + ":" + account
	who.ImpersonateGroups = []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}
}
