package operator

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

const (
	// besideMiB is what a copy takes beside its guest's memory: QEMU, the log, frames, and a sync on its way (docs/budgets.md).
	besideMiB = 512
	// diskMiB is what a backup may hold for each disk: disk_memory_mib.
	diskMiB = 512
	// besideProgramMiB is what a program's copy takes beside its own limit: the log, frames, and inputs that wait for it (docs/budgets.md).
	besideProgramMiB = 256
)

// pod is the one that stands for a copy. It holds the copy's processors and memory on its node, so that Kubernetes counts them, and runs nothing: the
// copy belongs to the node's daemon, which holds QEMU or the program by open descriptors, and ends when its group has agreed to it and not when a kubelet thinks so.
//
// A task's Pods are placed by agreement: anywhere before the VM or the program has its hosts, and afterwards, where one is lost and made anew, on one of those that
// are wished: the copy's own host, or others where it could go.
// A copy that is not there yet needs more than room, and its Pod says what.
func pod(object v1alpha1.Protected, number, strength int, wish []string, needs *v1alpha1.Needs, image string) *v1.Pod {
	kind := kindOf(object)
	labels := map[string]string{
		kind.label: object.GetName(), NumberLabel: strconv.Itoa(number),
		v1alpha1.StrengthLabel: strconv.Itoa(strength), v1alpha1.TaskLabel: object.GetName(), v1alpha1.CopyLabel: strconv.Itoa(number),
	}
	yes, no, nobody, now := true, false, int64(65534), int64(0)
	made := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: podName(object, number), Namespace: object.GetNamespace(), Labels: labels,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: v1alpha1.Version.String(), Kind: kind.name, Name: object.GetName(), UID: object.GetUID(), Controller: &yes,
			}},
		},
		Spec: v1.PodSpec{
			SchedulerName:                "dunlin-scheduler",
			AutomountServiceAccountToken: &no,
			EnableServiceLinks:           &no,
			// Nothing in it needs time to end.
			TerminationGracePeriodSeconds: &now,
			// An unreachable node's copy comes back with its node, so its place is kept.
			Tolerations: []v1.Toleration{
				{Key: v1.TaintNodeNotReady, Operator: v1.TolerationOpExists, Effect: v1.TaintEffectNoExecute},
				{Key: v1.TaintNodeUnreachable, Operator: v1.TolerationOpExists, Effect: v1.TaintEffectNoExecute},
			},
			SecurityContext: &v1.PodSecurityContext{
				RunAsNonRoot: &yes, RunAsUser: &nobody, SeccompProfile: &v1.SeccompProfile{Type: v1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []v1.Container{{
				Name: "stands-for-a-copy", Image: image,
				Resources: v1.ResourceRequirements{Requests: kind.needs(object)},
				SecurityContext: &v1.SecurityContext{
					AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes, Capabilities: &v1.Capabilities{Drop: []v1.Capability{"ALL"}},
				},
			}},
		},
	}
	if needs != nil {
		made.Annotations = map[string]string{v1alpha1.NeedsAnnotation: needs.String()}
	}
	if len(wish) > 0 {
		made.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{}}}
		terms := &made.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		for _, name := range wish {
			*terms = append(*terms, v1.NodeSelectorTerm{
				MatchFields: []v1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: v1.NodeSelectorOpIn, Values: []string{name}}},
			})
		}
	}
	return made
}

// wishOf is what [pod] was told.
func wishOf(pod *v1.Pod) (wish []string) {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.NodeAffinity == nil || pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	for _, term := range pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, field := range term.MatchFields {
			wish = append(wish, field.Values...)
		}
	}
	return wish
}

// pods are the VM's that there are, by copy; those that are of no use are taken away.
func (placer *placer) pods(ctx context.Context, object v1alpha1.Protected) (map[int]*v1.Pod, error) {
	list, kind := &v1.PodList{}, kindOf(object)
	if err := placer.List(ctx, list, client.InNamespace(object.GetNamespace()), client.MatchingLabels{kind.label: object.GetName()}); err != nil {
		return nil, err
	}
	pods, placement, strength := map[int]*v1.Pod{}, object.Seen().Placement, strengthOf(object)
	useless := func(pod *v1.Pod) bool {
		number := numberOf(pod)
		// Another strength was asked for before it was placed, or there is another number of copies: those Pods are of no use.
		return number < 0 || number >= strength || placement == nil && pod.Labels[v1alpha1.StrengthLabel] != fmt.Sprint(strength)
	}
	if slices.ContainsFunc(list.Items, func(pod v1.Pod) bool { return metav1.IsControlledBy(&pod, object) && useless(&pod) }) {
		// A task that gets a smaller R says so before its copies go, or they would be taken for lost ones.
		left := map[int]*v1.Pod{}
		for at := range list.Items {
			if pod := &list.Items[at]; metav1.IsControlledBy(pod, object) && !useless(pod) {
				left[numberOf(pod)] = pod
			}
		}
		if err := placer.relabel(ctx, object, left); err != nil {
			return nil, err
		}
	}
	for at := range list.Items {
		pod := &list.Items[at]
		number := numberOf(pod)
		if !metav1.IsControlledBy(pod, object) {
			continue
		}
		if useless(pod) || isGone(pod) && pod.DeletionTimestamp == nil {
			if err := placer.takeAway(ctx, pod); err != nil {
				return nil, err
			}
			continue
		}
		pods[number] = pod
	}
	return pods, nil
}

// strengthOf is how many Pods it has: what was asked for when it was placed, or what is asked for now where it is to get a standby.
func strengthOf(object v1alpha1.Protected) int {
	placement := object.Seen().Placement
	switch {
	case placement == nil:
		return object.Asked().Strength
	case grows(object):
		return object.Asked().Strength
	}
	return placement.Strength
}

// relabel has all Pods of a placed task say the R that it has now, the first copy's last: by that one schedulers go.
func (placer *placer) relabel(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod) error {
	strength := fmt.Sprint(strengthOf(object))
	for number := strengthOf(object) - 1; number >= 0; number-- {
		pod := pods[number]
		if pod == nil || pod.Labels[v1alpha1.StrengthLabel] == strength || object.Seen().Placement == nil {
			continue
		}
		before := pod.DeepCopy()
		pod.Labels[v1alpha1.StrengthLabel] = strength
		if err := placer.Patch(ctx, pod, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}

// takeAway deletes a Pod, if it is still as it was seen: another one may have got a node meanwhile. Nothing in it needs time to end, and a node that is gone
// says of none that it has.
func (placer *placer) takeAway(ctx context.Context, pod *v1.Pod) error {
	as := client.Preconditions{UID: &pod.UID, ResourceVersion: &pod.ResourceVersion}
	return client.IgnoreNotFound(placer.Delete(ctx, pod, client.GracePeriodSeconds(0), as))
}

// complete takes Pods away that are where their copies are not to be, and makes those that are missing, in pods; or it says why one cannot be made.
func (placer *placer) complete(ctx context.Context, object v1alpha1.Protected, pods map[int]*v1.Pod, seen view) (missing string, err error) {
	for number := 0; number < strengthOf(object); number++ {
		var wish []string
		if object.Seen().Placement != nil {
			wish = seen.wish(object, number)
		}
		if there := pods[number]; there != nil && !placer.fits(object, number, there, wish, seen) {
			if err := placer.takeAway(ctx, there); err != nil {
				return "", err
			}
			delete(pods, number)
		}
		if pods[number] != nil {
			continue
		}
		if placement := object.Seen().Placement; grows(object) && number >= placement.Strength && len(wish) == 0 {
			// There is no other host, and [host.carryOut] says so.
			continue
		}
		made, why, err := placer.make(ctx, object, number, wish, seen.hosts)
		if err != nil {
			return "", err
		}
		if why != "" {
			// Nor the others: whoever has one Pod of that name is to have all.
			return why, nil
		}
		pods[number] = made
	}
	// After the Pod is there that comes on top: where its copy may go is its to say.
	return "", placer.relabel(ctx, object, pods)
}

// fits says whether a Pod may stay as it is.
func (placer *placer) fits(object v1alpha1.Protected, number int, pod *v1.Pod, wish []string, seen view) bool {
	if len(wish) == 0 {
		return true
	}
	on, home := pod.Spec.NodeName, object.Seen().Placement.Homes()[number]
	switch {
	case seen.unsure[home]:
		// Where another operator has given it another place, that is not taken back before its host is heard again.
		return true
	case pod.DeletionTimestamp != nil:
		// Nobody says that it has ended where nobody is.
		return seen.away[on] != Lost && seen.away[on] != Deleted
	case on == "":
		return slices.Equal(wishOf(pod), wish)
	case !has(wish, on) && !has(object.Seen().Hosts(), on) && placer.refusals.lately(object, on):
		// It stands where the part is refused, and another host is to be asked.
		return false
	case !has(wish, on) && (seen.away[home] != "" || seen.seeksStandby(object, number)) && !has(object.Seen().Hosts(), on) && !seen.keepsPod(object, home):
		// A host that could have the copy, and is not heard just now.
		lost, _ := placer.patience.lasts("host "+on, isSilent(on, seen.hosts))
		return !lost
	}
	return has(wish, on)
}

// make makes a copy's Pod, or says why it cannot be made.
func (placer *placer) make(ctx context.Context, object v1alpha1.Protected, number int, wish []string, hosts map[string]*v1alpha1.DunlinHost) (*v1.Pod, string, error) {
	made := pod(object, number, strengthOf(object), wish, needsAt(object, number, wish, hosts), placer.image)
	// Whoever takes its place would be given memory that the copy goes on using.
	made.Spec.PriorityClassName = placer.class
	err := placer.Create(ctx, made)
	if apierrors.IsAlreadyExists(err) {
		there := &v1.Pod{}
		if err = placer.live.Get(ctx, client.ObjectKeyFromObject(made), there); err == nil && !metav1.IsControlledBy(there, object) {
			return nil, fmt.Sprintf("Pod '%s' is there already, and is somebody else's: delete it, or give the %s another name", made.Name, kindOf(object).name), nil
		}
		made = there
	}
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
		return nil, fmt.Sprintf("Pod '%s' cannot be made: %v", made.Name, err), nil
	}
	return made, "", client.IgnoreNotFound(err)
}

func podName(object v1alpha1.Protected, number int) string {
	return fmt.Sprintf("%s-%d", object.GetName(), number)
}

// numberOf is a copy's number; -1 of a Pod that says none.
func numberOf(pod *v1.Pod) int {
	number, err := strconv.Atoi(pod.Labels[NumberLabel])
	if err != nil {
		return -1
	}
	return number
}

func needsOfVM(object v1alpha1.Protected) v1.ResourceList {
	vm := object.(*v1alpha1.ProtectedVM).Spec.VM
	return needs(1000*int64(max(vm.VCPUs, 1)), vm.MemoryMiB+besideMiB+diskMiB*int64(len(vm.Disks)))
}

func needsOfProgram(object v1alpha1.Protected) v1.ResourceList {
	program := object.(*v1alpha1.ProtectedProgram).Spec.Program
	return needs(program.MilliCPU, program.MemoryMiB+besideProgramMiB)
}

func needs(milliCPU, memoryMiB int64) v1.ResourceList {
	return v1.ResourceList{
		v1.ResourceCPU:    *resource.NewMilliQuantity(milliCPU, resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(memoryMiB<<20, resource.BinarySI),
	}
}
