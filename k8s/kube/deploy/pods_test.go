package deploy_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/lab"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// dry is whatever would be changed: the server judges it, and keeps nothing.
var dry = []string{metav1.DryRunAll}

// podsOf are Pods as an account of Dunlin's may change them, as one of that name in another namespace may that has all rights, and as an administrator
// may. What others may not do with them a policy says.
func podsOf(t *testing.T, account lab.Account) (own, elsewhere, admin corev1.PodInterface, policy string) {
	t.Helper()
	plane := lab.Begin(t)
	plane.Install(t)
	plane.Rights(t)
	of := func(config *rest.Config) corev1.PodInterface {
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		return client.CoreV1().Pods("default")
	}
	const accounts = "system:serviceaccount:"
	own = of(plane.As(accounts+"dunlin-system:"+string(account), "system:serviceaccounts", "system:authenticated"))
	return own, of(plane.As(accounts+"ours:"+string(account), "system:masters")), of(plane.Config()), string(account) + "-pods"
}

// denies says whether a policy has refused something.
func denies(err error, policy string) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+policy+"'")
}

// inForce waits until a policy refuses something: the server reads it a little later.
func inForce(t *testing.T, policy string, wrong func() error) {
	t.Helper()
	testbed.Until(t, policy+" is in force", func() error {
		if err := wrong(); !denies(err, policy) {
			return fmt.Errorf("it says: %v", err)
		}
		return nil
	})
}

// standing is a Pod that stands for a copy, as operators make them.
func standing() *v1.Pod {
	yes, no := true, false
	pod := lab.Copy("shop", 0, 2, "1", "64Mi")
	pod.Labels[operator.VMLabel], pod.Labels[operator.NumberLabel] = "shop", "0"
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: v1alpha1.Version.String(), Kind: "ProtectedVM", Name: "shop", UID: "1", Controller: &yes}}
	pod.Spec.AutomountServiceAccountToken = &no
	pod.Spec.SecurityContext = &v1.PodSecurityContext{RunAsNonRoot: &yes}
	pod.Spec.Containers[0].SecurityContext = &v1.SecurityContext{AllowPrivilegeEscalation: &no, Capabilities: &v1.Capabilities{Drop: []v1.Capability{"ALL"}}}
	return pod
}

// Whoever has an operator's token can do no more with it. What operators need is what all tests with operators have of these rights.
func TestTheOperatorHasOnlyPodsThatStandForCopies(t *testing.T) {
	pods, elsewhere, admin, policy := podsOf(t, lab.OperatorAccount)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	create := func(change func(*v1.Pod)) error {
		pod := standing()
		change(pod)
		_, err := pods.Create(ctx, pod, metav1.CreateOptions{DryRun: dry})
		return err
	}
	inForce(t, policy, func() error { return create(func(pod *v1.Pod) { pod.OwnerReferences = nil }) })
	no := false
	one := func(pod *v1.Pod) *v1.Container { return &pod.Spec.Containers[0] }
	for what, change := range map[string]func(*v1.Pod){
		"another kind's":              func(pod *v1.Pod) { pod.OwnerReferences[0].Kind = "ReplicaQuota" },
		"another group's":             func(pod *v1.Pod) { pod.OwnerReferences[0].APIVersion = "apps/v1" },
		"nobody's by control":         func(pod *v1.Pod) { pod.OwnerReferences[0].Controller = nil },
		"not labelled":                func(pod *v1.Pod) { delete(pod.Labels, operator.VMLabel) },
		"without any label":           func(pod *v1.Pod) { pod.Labels = nil },
		"on a node of its choice":     func(pod *v1.Pod) { pod.Spec.NodeName = "a" },
		"another scheduler's":         func(pod *v1.Pod) { pod.Spec.SchedulerName = "default-scheduler" },
		"with a token":                func(pod *v1.Pod) { pod.Spec.AutomountServiceAccountToken = nil },
		"in its node's network":       func(pod *v1.Pod) { pod.Spec.HostNetwork = true },
		"among its node's processes":  func(pod *v1.Pod) { pod.Spec.HostPID = true },
		"with its node's IPC":         func(pod *v1.Pod) { pod.Spec.HostIPC = true },
		"perhaps root":                func(pod *v1.Pod) { pod.Spec.SecurityContext = nil },
		"perhaps root in a container": func(pod *v1.Pod) { one(pod).SecurityContext.RunAsNonRoot = &no },
		// A privileged one may gain privileges, too, or no API server takes it.
		"with privileges to be gained":     func(pod *v1.Pod) { one(pod).SecurityContext.AllowPrivilegeEscalation = nil },
		"with capabilities that are kept":  func(pod *v1.Pod) { one(pod).SecurityContext.Capabilities = nil },
		"with capabilities that are added": func(pod *v1.Pod) { one(pod).SecurityContext.Capabilities.Add = []v1.Capability{"NET_ADMIN"} },
		"without a container's context":    func(pod *v1.Pod) { one(pod).SecurityContext = nil },
		"with a Secret's value": func(pod *v1.Pod) {
			key := &v1.SecretKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "keys"}, Key: "key"}
			one(pod).Env = []v1.EnvVar{{Name: "KEY", ValueFrom: &v1.EnvVarSource{SecretKeyRef: key}}}
		},
		"with a Secret's values": func(pod *v1.Pod) {
			one(pod).EnvFrom = []v1.EnvFromSource{{SecretRef: &v1.SecretEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "keys"}}}}
		},
		"with a port of its node's": func(pod *v1.Pod) { one(pod).Ports = []v1.ContainerPort{{ContainerPort: 80, HostPort: 80}} },
		"with a folder of its node's": func(pod *v1.Pod) {
			pod.Spec.Volumes = []v1.Volume{{Name: "root", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/"}}}}
		},
		"with something before it": func(pod *v1.Pod) { pod.Spec.InitContainers = []v1.Container{{Name: "first", Image: "none"}} },
		"with something beside it": func(pod *v1.Pod) {
			pod.Spec.Containers = append(pod.Spec.Containers, v1.Container{Name: "two", Image: "none"})
		},
	} {
		if err := create(change); !denies(err, policy) {
			t.Errorf("a Pod that is %s is made; it said: %v", what, err)
		}
	}
	asProgram := func(pod *v1.Pod) {
		delete(pod.Labels, operator.VMLabel)
		pod.Labels[operator.ProgramLabel], pod.OwnerReferences[0].Kind = "shop", "ProtectedProgram"
	}
	if err := create(asProgram); err != nil {
		t.Errorf("a program's: %v", err)
	}
	if _, err := pods.Create(ctx, standing(), metav1.CreateOptions{}); err != nil {
		t.Fatalf("a VM's: %v", err)
	}
	ordinary := lab.Pod("ordinary", "1", "64Mi")
	if _, err := admin.Create(ctx, ordinary, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	changes(t, pods, policy, "ordinary", map[string]bool{`{"metadata":{"labels":{"dunlin.dev/strength":"3"}}}`: false})
	changes(t, pods, policy, "shop-0", map[string]bool{
		`{"metadata":{"labels":{"dunlin.dev/strength":"3"}}}`:                            true,
		`{"metadata":{"labels":{"dunlin.dev/strength":null}}}`:                           false,
		`{"metadata":{"labels":{"dunlin.dev/strength":"3","app":"front"}}}`:              false,
		`{"metadata":{"labels":{"dunlin.dev/copy":"1"}}}`:                                false,
		`{"metadata":{"labels":{"dunlin.dev/copy":null}}}`:                               false,
		`{"metadata":{"annotations":{"dunlin.dev/needs":"{}"}}}`:                         false,
		`{"metadata":{"finalizers":["others.dev/one"]}}`:                                 false,
		`{"metadata":{"ownerReferences":null}}`:                                          false,
		`{"spec":{"containers":[{"name":"one","image":"another"}]}}`:                     false,
		`{"spec":{"activeDeadlineSeconds":1},"metadata":{"labels":{"dunlin.dev/x":""}}}`: false,
	})
	if err := pods.Delete(ctx, "ordinary", metav1.DeleteOptions{DryRun: dry}); !denies(err, policy) {
		t.Errorf("somebody else's Pod is deleted; it said: %v", err)
	}
	if err := elsewhere.Delete(ctx, "ordinary", metav1.DeleteOptions{DryRun: dry}); !denies(err, policy) {
		t.Errorf("somebody else's Pod is deleted by operators of another namespace; it said: %v", err)
	}
	if err := pods.Delete(ctx, "shop-0", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
		t.Errorf("its own Pod: %v", err)
	}
}

// changes asks for each change of a Pod, and fails where one that may be made is refused, or one that may not is not.
func changes(t *testing.T, pods corev1.PodInterface, policy, name string, all map[string]bool) {
	t.Helper()
	for change, may := range all {
		_, err := pods.Patch(context.Background(), name, types.StrategicMergePatchType, []byte(change), metav1.PatchOptions{DryRun: dry})
		if may && err != nil || !may && !denies(err, policy) {
			t.Errorf("%s of Pod '%s' may be made: %v; it said: %v", change, name, may, err)
		}
	}
}

// The same of a scheduler's token.
func TestTheSchedulerChangesOnlyCopiesClaims(t *testing.T) {
	pods, elsewhere, admin, policy := podsOf(t, lab.SchedulerAccount)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	critical := lab.Pod("critical", "1", "64Mi")
	critical.Spec.PriorityClassName = "system-node-critical"
	for _, pod := range []*v1.Pod{lab.Copy("shop", 0, 2, "1", "64Mi"), lab.Pod("ordinary", "1", "64Mi"), critical} {
		if _, err := admin.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	const claim = `{"metadata":{"annotations":{"dunlin.dev/claim":"1 a"}}}`
	inForce(t, policy, func() error {
		_, err := pods.Patch(ctx, "ordinary", types.StrategicMergePatchType, []byte(claim), metav1.PatchOptions{DryRun: dry})
		return err
	})
	changes(t, pods, policy, "shop-0", map[string]bool{
		claim: true,
		`{"metadata":{"annotations":{"dunlin.dev/claim":"1 a","dunlin.dev/needs":"{}"}}}`: false,
		`{"metadata":{"labels":{"dunlin.dev/strength":"3"}}}`:                             false,
		`{"metadata":{"labels":{"app":"front"}}}`:                                         false,
		`{"metadata":{"finalizers":["others.dev/one"]}}`:                                  false,
		`{"spec":{"containers":[{"name":"one","image":"another"}]}}`:                      false,
	})
	for name, may := range map[string]bool{"shop-0": true, "ordinary": true, "critical": false} {
		if err := pods.Delete(ctx, name, metav1.DeleteOptions{DryRun: dry}); may && err != nil || !may && !denies(err, policy) {
			t.Errorf("Pod '%s' may be deleted: %v; it said: %v", name, may, err)
		}
	}
	if err := elsewhere.Delete(ctx, "critical", metav1.DeleteOptions{DryRun: dry}); !denies(err, policy) {
		t.Errorf("a critical Pod is deleted by schedulers of another namespace; it said: %v", err)
	}
}
