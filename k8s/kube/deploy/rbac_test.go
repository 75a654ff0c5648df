package deploy_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	authorization "k8s.io/api/authorization/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// kind is one of those that users make.
type kind struct {
	name, resource, word, finalizer string
	spec                            map[string]any
	// change is something that an editor may change.
	change string
}

var (
	vms = kind{
		"ProtectedVM", "protectedvms", "VM", operator.Finalizer, map[string]any{"vm": map[string]any{"memoryMiB": int64(64), "kernel": "/k"}},
		`{"spec":{"policy":"remus"}}`,
	}
	programs = kind{
		"ProtectedProgram", "protectedprograms", "program", operator.ProgramFinalizer, map[string]any{"program": map[string]any{
			"command": []any{"/p"}, "memoryMiB": int64(64), "nics": []any{map[string]any{"mac": "52:54:00:12:34:57", "address": "10.0.0.57/24"}},
		}},
		`{"metadata":{"labels":{"tier":"front"}}}`,
	}
)

func (kind kind) of(client dynamic.Interface, namespace string) dynamic.ResourceInterface {
	return client.Resource(v1alpha1.Version.WithResource(kind.resource)).Namespace(namespace)
}

func (kind kind) shop(namespace string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "dunlin.dev/v1alpha1", "kind": kind.name,
		"metadata": map[string]any{"name": "shop", "namespace": namespace, "finalizers": []any{kind.finalizer}},
		"spec":     kind.spec,
	}}
}

// ask asks for everything that can be asked of an object that is there.
func (kind kind) ask(ctx context.Context, client dynamic.Interface, namespace string) map[string]error {
	of := kind.of(client, namespace)
	said := map[string]error{}
	made := kind.shop(namespace)
	made.SetName("another")
	made.SetFinalizers(nil)
	_, said["create"] = of.Create(ctx, made, metav1.CreateOptions{})
	_, said["get"] = of.Get(ctx, "shop", metav1.GetOptions{})
	_, said["list"] = of.List(ctx, metav1.ListOptions{})
	watch, err := of.Watch(ctx, metav1.ListOptions{})
	if err == nil {
		watch.Stop()
	}
	said["watch"] = err
	_, said["patch"] = of.Patch(ctx, "shop", types.MergePatchType, []byte(kind.change), metav1.PatchOptions{})
	status := []byte(`{"status":{"state":"running","primary":"mine"}}`)
	_, said["patch status"] = of.Patch(ctx, "shop", types.MergePatchType, status, metav1.PatchOptions{}, "status")
	_, said["take the finalizer away"] = of.Patch(ctx, "shop", types.MergePatchType, []byte(`{"metadata":{"finalizers":["others.dev/one"]}}`), metav1.PatchOptions{})
	said["delete collection"] = of.DeleteCollection(ctx, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}, metav1.ListOptions{})
	said["delete"] = of.Delete(ctx, "shop", metav1.DeleteOptions{})
	return said
}

func TestNobodyWithoutRightsMakesReadsOrEndsAVM(t *testing.T) { nobodyWithoutRights(t, vms) }

func TestNobodyWithoutRightsMakesReadsOrEndsAProgram(t *testing.T) { nobodyWithoutRights(t, programs) }

func nobodyWithoutRights(t *testing.T, kind kind) {
	plane := lab.Begin(t)
	plane.Install(t)
	plane.Rights(t)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	admin, err := kubernetes.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	objects, err := dynamic.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	for _, namespace := range []string{"shops", "others"} {
		if _, err := admin.CoreV1().Namespaces().Create(ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := kind.of(objects, namespace).Create(ctx, kind.shop(namespace), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	bind := func(user, role string) {
		binding := &rbac.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: role},
			Subjects: []rbac.Subject{{Kind: "User", APIGroup: rbac.GroupName, Name: user}},
		}
		if _, err := admin.RbacV1().RoleBindings("shops").Create(ctx, binding, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	role := "dunlin-" + strings.ToLower(kind.word)
	bind("vera", role+"-viewer")
	bind("ed", role+"-editor")
	without := []byte(`{"metadata":{"finalizers":null}}`)
	testbed.Until(t, "the policy is in force", func() error {
		// The server reads it a little later, and asks it also where nothing is written.
		client, err := dynamic.NewForConfig(plane.As("ed", "system:authenticated"))
		if err != nil {
			return err
		}
		_, err = kind.of(client, "shops").Patch(ctx, "shop", types.MergePatchType, without, metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), fmt.Sprintf("finalizer %s stays until the %s has ended", kind.finalizer, kind.word)) {
			return fmt.Errorf("it says: %v", err)
		}
		return nil
	})
	look := map[string]bool{"get": true, "list": true, "watch": true}
	// The status is the operator's to write, and one by one is how an editor deletes.
	edit := map[string]bool{"get": true, "list": true, "watch": true, "create": true, "patch": true, "delete": true}
	// Each in this order: the editor's delete ends what all others asked for.
	for _, one := range []struct {
		user, namespace string
		may             map[string]bool
	}{
		{"mallory", "shops", nil}, {"mallory", "others", nil}, {"vera", "others", nil}, {"ed", "others", nil}, {"vera", "shops", look}, {"ed", "shops", edit},
	} {
		client, err := dynamic.NewForConfig(plane.As(one.user, "system:authenticated"))
		if err != nil {
			t.Fatal(err)
		}
		testbed.Until(t, one.user+" has what they may", func() error {
			if one.may == nil {
				return nil
			}
			// The server hears of a binding a little later.
			_, err := kind.of(client, one.namespace).List(ctx, metav1.ListOptions{})
			return err
		})
		for what, err := range kind.ask(ctx, client, one.namespace) {
			if one.may[what] && err != nil || !one.may[what] && !apierrors.IsForbidden(err) {
				t.Errorf("%s may %s in %s: %v; it said: %v", one.user, what, one.namespace, one.may[what], err)
			}
		}
	}
	if _, err := kind.of(objects, "others").Get(ctx, "shop", metav1.GetOptions{}); err != nil {
		t.Errorf("somebody else's %s: %v", kind.word, err)
	}
	// What the editor has deleted is there until the operator lets it go.
	there, err := kind.of(objects, "shops").Get(ctx, "shop", metav1.GetOptions{})
	if err != nil || there.GetDeletionTimestamp() == nil {
		t.Fatalf("the deleted %s: %v, %v", kind.word, there, err)
	}
	operators, err := dynamic.NewForConfig(plane.As("system:serviceaccount:dunlin-system:dunlin-operator", "system:serviceaccounts", "system:authenticated"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kind.of(operators, "shops").Patch(ctx, "shop", types.MergePatchType, without, metav1.PatchOptions{}); err != nil {
		t.Errorf("the operator may not take the finalizer away: %v", err)
	}
	if _, err := kind.of(objects, "shops").Get(ctx, "shop", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("it is there: %v", err)
	}
}

// right is something that an account asks for: verb, group, resource, subresource, namespace, name.
type right [6]string

// mayNot fails where an account may do what it does not need. What it needs is what all other tests have of it.
func mayNot(t *testing.T, account lab.Account, rights ...right) {
	plane := lab.Begin(t)
	plane.Install(t)
	plane.Rights(t)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	admin, err := kubernetes.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	may := func(right right) bool {
		review := &authorization.SubjectAccessReview{Spec: authorization.SubjectAccessReviewSpec{
			User: "system:serviceaccount:dunlin-system:" + string(account), Groups: []string{"system:serviceaccounts", "system:authenticated"},
			ResourceAttributes: &authorization.ResourceAttributes{
				Verb: right[0], Group: right[1], Resource: right[2], Subresource: right[3], Namespace: right[4], Name: right[5],
			},
		}}
		said, err := admin.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return said.Status.Allowed
	}
	if !may(right{"list", "", "pods", "", "shops", ""}) {
		t.Fatalf("%s may not even list Pods, so that nothing below says anything", account)
	}
	for _, no := range rights {
		if may(no) {
			t.Errorf("%s may %v", account, no)
		}
	}
}

func TestTheOperatorMayNoMoreThanItNeeds(t *testing.T) {
	mayNot(t, lab.OperatorAccount, []right{
		{"get", "", "secrets", "", "shops", ""}, {"list", "", "secrets", "", "dunlin-system", ""}, {"create", "dunlin.dev", "protectedvms", "", "shops", ""},
		{"delete", "dunlin.dev", "protectedvms", "", "shops", ""}, {"create", "dunlin.dev", "protectedprograms", "", "shops", ""},
		{"delete", "dunlin.dev", "protectedprograms", "", "shops", ""}, {"delete", "dunlin.dev", "dunlinhosts", "", "", "a"}, {"patch", "dunlin.dev", "dunlinhosts", "", "", "a"},
		{"create", "", "pods", "exec", "shops", "shop-0"}, {"update", "", "pods", "", "shops", "shop-0"}, {"patch", "", "nodes", "", "", "a"},
		{"delete", "", "nodes", "", "", "a"}, {"update", "coordination.k8s.io", "leases", "", "dunlin-system", "another"},
		{"update", "coordination.k8s.io", "leases", "", "kube-system", "dunlin-operator"}, {"create", "rbac.authorization.k8s.io", "clusterrolebindings", "", "", ""},
		{"impersonate", "", "users", "", "", "admin"}, {"create", "", "pods", "binding", "shops", "shop-0"}, {"deletecollection", "", "pods", "", "shops", ""},
		{"patch", "", "pods", "status", "shops", "shop-0"}, {"patch", "", "pods", "ephemeralcontainers", "shops", "shop-0"}, {"get", "", "pods", "log", "shops", "shop-0"},
	}...)
}

func TestTheSchedulerMayNoMoreThanItNeeds(t *testing.T) {
	mayNot(t, lab.SchedulerAccount, []right{
		{"get", "", "secrets", "", "shops", ""}, {"list", "", "secrets", "", "dunlin-system", ""}, {"get", "", "configmaps", "", "kube-system", ""},
		{"create", "", "pods", "", "shops", ""}, {"update", "", "pods", "", "shops", "shop-0"}, {"create", "", "pods", "exec", "shops", "shop-0"},
		{"create", "", "pods", "eviction", "shops", "shop-0"}, {"patch", "", "nodes", "", "", "a"}, {"patch", "", "nodes", "status", "", "a"}, {"delete", "", "nodes", "", "", "a"},
		{"list", "dunlin.dev", "protectedvms", "", "shops", ""}, {"patch", "dunlin.dev", "protectedvms", "status", "shops", "shop"},
		{"patch", "dunlin.dev", "dunlinhosts", "status", "", "a"}, {"create", "dunlin.dev", "replicaquotas", "", "shops", ""}, {"patch", "dunlin.dev", "replicaquotas", "", "shops", "quota"},
		{"update", "coordination.k8s.io", "leases", "", "kube-system", "kube-scheduler"}, {"create", "authentication.k8s.io", "tokenreviews", "", "", ""},
		{"create", "rbac.authorization.k8s.io", "clusterrolebindings", "", "", ""}, {"impersonate", "", "users", "", "", "admin"},
		{"deletecollection", "", "pods", "", "shops", ""}, {"update", "", "pods", "finalizers", "shops", "shop-0"},
		{"patch", "", "pods", "ephemeralcontainers", "shops", "shop-0"}, {"get", "", "pods", "log", "shops", "shop-0"},
	}...)
}
