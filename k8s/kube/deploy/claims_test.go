package deploy_test

import (
	"context"
	"testing"

	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

// A Pod with a claim is not counted for itself. Whoever may edit Pods in a namespace gives none a claim, nor changes one or takes it away, also not by an account of that
// namespace's that is called as the schedulers' is; nor does an operator.
func TestNobodyButASchedulerWritesClaims(t *testing.T) {
	const policy = "dunlin-claims"
	plane := lab.Begin(t)
	plane.Install(t)
	plane.Rights(t)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	as := func(user string) corev1.PodInterface {
		client, err := kubernetes.NewForConfig(plane.As(user, "system:authenticated"))
		if err != nil {
			t.Fatal(err)
		}
		return client.CoreV1().Pods("default")
	}
	const accounts = "system:serviceaccount:"
	ed, theirs, operator, scheduler := as("ed"), as(accounts+"default:dunlin-scheduler"), as(accounts+"dunlin-system:dunlin-operator"), as(accounts+"dunlin-system:dunlin-scheduler")
	admin, err := kubernetes.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	// What Kubernetes' own role 'edit' is made of: nobody puts it together here.
	binding := &rbac.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "edit"}, RoleRef: rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: "system:aggregate-to-edit"},
		Subjects: []rbac.Subject{{Kind: "User", APIGroup: rbac.GroupName, Name: "ed"}, {Kind: "ServiceAccount", Namespace: "default", Name: "dunlin-scheduler"}},
	}
	if _, err := admin.RbacV1().RoleBindings("default").Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// As the controller of DaemonSets, which makes Pods as anybody has written them.
	rules := []rbac.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods", "pods/binding"}, Verbs: []string{"create"}}}
	if _, err := admin.RbacV1().Roles("default").Create(ctx, &rbac.Role{ObjectMeta: metav1.ObjectMeta{Name: "binds"}, Rules: rules}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binds := &rbac.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "binds"}, RoleRef: rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "Role", Name: "binds"},
		Subjects: []rbac.Subject{{Kind: "User", APIGroup: rbac.GroupName, Name: "sets"}},
	}
	if _, err := admin.RbacV1().RoleBindings("default").Create(ctx, binds, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	sets := as("sets")
	create := func(pods corev1.PodInterface, pod *v1.Pod, claim string) error {
		if claim != "" {
			pod.Annotations = map[string]string{"dunlin.dev/claim": claim}
		}
		_, err := pods.Create(ctx, pod, metav1.CreateOptions{DryRun: dry})
		return err
	}
	testbed.Until(t, "the editor has their rights", func() error {
		if err := create(theirs, lab.Pod("plain", "1", "64Mi"), ""); err != nil {
			return err
		}
		if err := create(sets, lab.Pod("plain", "1", "64Mi"), ""); err != nil {
			return err
		}
		return create(ed, lab.Pod("plain", "1", "64Mi"), "")
	})
	copy := func() *v1.Pod {
		pod := lab.Copy("shop", 0, 2, "1", "64Mi")
		pod.Spec.NodeName = "a"
		return pod
	}
	inForce(t, policy, func() error { return create(ed, copy(), "18446744073709551615 a") })
	for who, err := range map[string]error{
		"an account of the schedulers' name": create(theirs, copy(), "1 a"), "an operator": create(operator, standing(), "1 a"), "who may bind Pods": create(sets, copy(), "1 a"), "an editor, of an ordinary Pod": create(ed, lab.Pod("plain", "1", "64Mi"), "1 a"),
	} {
		if !denies(err, policy) {
			t.Errorf("%s makes a Pod with a claim; it said: %v", who, err)
		}
	}
	if err := create(ed, copy(), ""); err != nil {
		t.Errorf("a copy without a claim: %v", err)
	}
	if _, err := admin.CoreV1().Pods("default").Create(ctx, standing(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	patch := func(pods corev1.PodInterface, change string, options metav1.PatchOptions) error {
		_, err := pods.Patch(ctx, "shop-0", types.StrategicMergePatchType, []byte(change), options)
		return err
	}
	const claim, other = `{"metadata":{"annotations":{"dunlin.dev/claim":"1 a"}}}`, `{"metadata":{"annotations":{"dunlin.dev/claim":"2 b"}}}`
	changes(t, ed, policy, "shop-0", map[string]bool{claim: false, `{"metadata":{"annotations":{"note":"mine"}}}`: true})
	if err := patch(scheduler, claim, metav1.PatchOptions{}); err != nil {
		t.Fatalf("a scheduler's claim: %v", err)
	}
	changes(t, ed, policy, "shop-0", map[string]bool{
		other: false, `{"metadata":{"annotations":{"dunlin.dev/claim":null}}}`: false, claim: true, `{"metadata":{"labels":{"tier":"front"}}}`: true,
	})
	// Of two policies either may say it.
	if err := patch(operator, other, metav1.PatchOptions{DryRun: dry}); !apierrors.IsForbidden(err) {
		t.Errorf("an operator changes a claim; it said: %v", err)
	}
	if err := patch(operator, `{"metadata":{"labels":{"dunlin.dev/strength":"3"}}}`, metav1.PatchOptions{DryRun: dry}); err != nil {
		t.Errorf("an operator changes the R of a copy with a claim: %v", err)
	}
	if err := patch(scheduler, other, metav1.PatchOptions{DryRun: dry}); err != nil {
		t.Errorf("a scheduler's newer claim: %v", err)
	}
}
