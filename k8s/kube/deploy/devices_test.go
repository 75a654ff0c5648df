package deploy_test

import (
	"context"
	"testing"

	authorization "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/log/testbed"
)

// kube-scheduler's own plugin for devices writes into a claim and its status before it binds an ordinary Pod, and nobody's test here has devices.
func TestTheSchedulerMayGivePodsTheirDevices(t *testing.T) {
	plane := lab.Begin(t)
	plane.Rights(t)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	client, err := kubernetes.NewForConfig(plane.As("system:serviceaccount:dunlin-system:"+string(lab.SchedulerAccount), "system:serviceaccounts", "system:authenticated"))
	if err != nil {
		t.Fatal(err)
	}
	for want, verbs := range map[bool][]string{true: {"get", "list", "watch", "update", "patch"}, false: {"create", "delete", "deletecollection"}} {
		for _, verb := range verbs {
			for _, subresource := range []string{"", "status"} {
				if verb != "update" && verb != "patch" && subresource != "" {
					continue
				}
				review := &authorization.SelfSubjectAccessReview{Spec: authorization.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorization.ResourceAttributes{
					Verb: verb, Group: "resource.k8s.io", Resource: "resourceclaims", Subresource: subresource, Namespace: "shops", Name: "gpu",
				}}}
				said, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
				if err != nil || said.Status.Allowed != want {
					t.Errorf("a scheduler may %s claims of devices (%s): %v, %v", verb, subresource, said.Status.Allowed, err)
				}
			}
		}
	}
}
