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
	"dunlin.dev/k8s/kube/deploy"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

var vms = v1alpha1.Version.WithResource("protectedvms")

func shop(namespace string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "dunlin.dev/v1alpha1", "kind": "ProtectedVM",
		"metadata": map[string]any{"name": "shop", "namespace": namespace, "finalizers": []any{operator.Finalizer}},
		"spec":     map[string]any{"vm": map[string]any{"memoryMiB": int64(64), "kernel": "/var/lib/dunlin/images/" + namespace + "/k"}},
	}}
}

// ask asks for everything that can be asked of a ProtectedVM that is there.
func ask(ctx context.Context, client dynamic.Interface, namespace string) map[string]error {
	of := client.Resource(vms).Namespace(namespace)
	said := map[string]error{}
	made := shop(namespace)
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
	_, said["patch"] = of.Patch(ctx, "shop", types.MergePatchType, []byte(`{"spec":{"policy":"remus"}}`), metav1.PatchOptions{})
	status := []byte(`{"status":{"state":"running","primary":"mine"}}`)
	_, said["patch status"] = of.Patch(ctx, "shop", types.MergePatchType, status, metav1.PatchOptions{}, "status")
	_, said["take the finalizer away"] = of.Patch(ctx, "shop", types.MergePatchType, []byte(`{"metadata":{"finalizers":["others.dev/one"]}}`), metav1.PatchOptions{})
	said["delete collection"] = of.DeleteCollection(ctx, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}, metav1.ListOptions{})
	said["delete"] = of.Delete(ctx, "shop", metav1.DeleteOptions{})
	return said
}

func TestNobodyWithoutRightsMakesReadsOrEndsAVM(t *testing.T) {
	plane := lab.Begin(t)
	plane.Install(t)
	plane.Apply(t, deploy.RBAC)
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
		if _, err := objects.Resource(vms).Namespace(namespace).Create(ctx, shop(namespace), metav1.CreateOptions{}); err != nil {
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
	bind("vera", "dunlin-vm-viewer")
	bind("ed", "dunlin-vm-editor")
	without := []byte(`{"metadata":{"finalizers":null}}`)
	testbed.Until(t, "the policy is in force", func() error {
		// The server reads it a little later, and asks it also where nothing is written.
		client, err := dynamic.NewForConfig(plane.As("ed", "system:authenticated"))
		if err != nil {
			return err
		}
		_, err = client.Resource(vms).Namespace("shops").Patch(ctx, "shop", types.MergePatchType, without, metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "finalizer dunlin.dev/vm stays until the VM has ended") {
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
			_, err := client.Resource(vms).Namespace(one.namespace).List(ctx, metav1.ListOptions{})
			return err
		})
		for what, err := range ask(ctx, client, one.namespace) {
			if one.may[what] && err != nil || !one.may[what] && !apierrors.IsForbidden(err) {
				t.Errorf("%s may %s in %s: %v; it said: %v", one.user, what, one.namespace, one.may[what], err)
			}
		}
	}
	if _, err := objects.Resource(vms).Namespace("others").Get(ctx, "shop", metav1.GetOptions{}); err != nil {
		t.Errorf("somebody else's VM: %v", err)
	}
	// What the editor has deleted is there until the operator lets it go.
	there, err := objects.Resource(vms).Namespace("shops").Get(ctx, "shop", metav1.GetOptions{})
	if err != nil || there.GetDeletionTimestamp() == nil {
		t.Fatalf("the deleted VM: %v, %v", there, err)
	}
	operators, err := dynamic.NewForConfig(plane.As("system:serviceaccount:dunlin-system:dunlin-operator", "system:serviceaccounts", "system:authenticated"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := operators.Resource(vms).Namespace("shops").Patch(ctx, "shop", types.MergePatchType, without, metav1.PatchOptions{}); err != nil {
		t.Errorf("the operator may not take the finalizer away: %v", err)
	}
	if _, err := objects.Resource(vms).Namespace("shops").Get(ctx, "shop", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("it is there: %v", err)
	}
}

func TestTheOperatorMayNoMoreThanItNeeds(t *testing.T) {
	plane := lab.Begin(t)
	plane.Install(t)
	plane.Apply(t, deploy.RBAC)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	admin, err := kubernetes.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	may := func(verb, group, resource, subresource, namespace, name string) bool {
		review := &authorization.SubjectAccessReview{Spec: authorization.SubjectAccessReviewSpec{
			User: "system:serviceaccount:dunlin-system:dunlin-operator", Groups: []string{"system:serviceaccounts", "system:authenticated"},
			ResourceAttributes: &authorization.ResourceAttributes{
				Verb: verb, Group: group, Resource: resource, Subresource: subresource, Namespace: namespace, Name: name,
			},
		}}
		said, err := admin.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return said.Status.Allowed
	}
	testbed.Until(t, "the operator has its rights", func() error {
		if !may("list", "", "pods", "", "shops", "") {
			return apierrors.NewForbidden(v1.Resource("pods"), "", nil)
		}
		return nil
	})
	for _, no := range [][]string{
		{"get", "", "secrets", "", "shops", ""}, {"list", "", "secrets", "", "dunlin-system", ""}, {"create", "dunlin.dev", "protectedvms", "", "shops", ""},
		{"delete", "dunlin.dev", "protectedvms", "", "shops", ""}, {"delete", "dunlin.dev", "dunlinhosts", "", "", "a"}, {"patch", "dunlin.dev", "dunlinhosts", "", "", "a"},
		{"create", "", "pods", "exec", "shops", "shop-0"}, {"update", "", "pods", "", "shops", "shop-0"}, {"patch", "", "nodes", "", "", "a"},
		{"delete", "", "nodes", "", "", "a"}, {"update", "coordination.k8s.io", "leases", "", "dunlin-system", "another"},
		{"update", "coordination.k8s.io", "leases", "", "kube-system", "dunlin-operator"}, {"create", "rbac.authorization.k8s.io", "clusterrolebindings", "", "", ""},
		{"impersonate", "", "users", "", "", "admin"}, {"create", "", "pods", "binding", "shops", "shop-0"},
	} {
		if may(no[0], no[1], no[2], no[3], no[4], no[5]) {
			t.Errorf("the operator may %v", no)
		}
	}
}
