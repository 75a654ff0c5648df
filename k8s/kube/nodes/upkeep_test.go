package nodes_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/control"
	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/operator"
	"dunlin.dev/log/testbed"
)

// kubectl is the real one's.
func (demo *demo) kubectl(arguments ...string) {
	demo.Helper()
	said, err := demo.plane.Kubectl(demo.T, arguments...)
	demo.Logf("%s: kubectl %s: %s", time.Now().UTC().Format("15:04:05"), strings.Join(arguments, " "), strings.TrimSpace(said))
	if err != nil {
		demo.Fatal(err)
	}
}

// asAsked says whether it is as its newest spec says.
func asAsked(vm *v1alpha1.ProtectedVM) bool {
	return vm.Status.ObservedGeneration == vm.Generation && meta.IsStatusConditionTrue(vm.Status.Conditions, operator.AsAsked) &&
		meta.IsStatusConditionTrue(vm.Status.Conditions, operator.Placed)
}

// hasNothing waits until a node has nothing of the VM: neither its daemon, nor a folder of its, nor a container.
func (demo *demo) hasNothing(name, vm string) {
	demo.Helper()
	testbed.Until(demo.T, "node "+name+" has nothing of the VM", func() error {
		host, err := control.New(demo.hosts.Socket(name)).Status(context.Background())
		if err != nil {
			return err
		}
		if there, found := host.Find(vm); found {
			return fmt.Errorf("its daemon has %+v", there)
		}
		var kept []string
		err = filepath.WalkDir(demo.hosts.Folder(name), func(path string, _ os.DirEntry, err error) error {
			if filepath.Base(path) == vm {
				kept = append(kept, path)
			}
			return err
		})
		if err != nil || len(kept) > 0 {
			return fmt.Errorf("it keeps %v: %w", kept, err)
		}
		if containers := demo.nodes[name].Runs("dunlin.dev/dunlin-pause"); len(containers) > 0 {
			return fmt.Errorf("its containers are %v", containers)
		}
		return nil
	})
}

// runs waits until all Pods of the VM run, as their kubelets say. One that is taken away while its kubelet still starts it can make a worker of kubelet 1.34 panic
// (doPodResizeAction), and its container is left to nobody.
func (demo *demo) runs(pods int) {
	demo.Helper()
	testbed.Until(demo.T, fmt.Sprintf("%d Pods run", pods), func() error {
		all := &v1.PodList{}
		if err := demo.api.List(context.Background(), all, client.InNamespace("default")); err != nil {
			return err
		}
		ready := 0
		for _, pod := range all.Items {
			for _, condition := range pod.Status.Conditions {
				if condition.Type == v1.PodReady && condition.Status == v1.ConditionTrue {
					ready++
				}
			}
		}
		if ready != pods || len(all.Items) != pods {
			return fmt.Errorf("%d of %d are ready", ready, len(all.Items))
		}
		return nil
	})
}

// What persons do while clients count on connections that are never made anew: they drain the node that serves, ask for a standby, lose the backup's node, ask for the
// standby no more, and delete the object.
func TestPersonsDrainChangeAndDelete(t *testing.T) {
	demo := begin(t)
	before, clients := demo.serves()
	if runs := demo.nodes[before.Status.Backup].Runs("dunlin.dev/dunlin-pause"); len(runs) != 1 {
		t.Fatalf("a copy's node runs %v", runs)
	}

	drained := before.Status.Primary
	demo.kubectl("drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=100s")
	after := demo.until("another node serves it, and the drained one's copy is on a third", func(vm *v1alpha1.ProtectedVM) bool {
		return isProtected(vm) && asAsked(vm) && vm.Status.Primary == before.Status.Backup && vm.Status.Backup != drained && vm.Status.Witness == before.Status.Witness
	})
	clients.until(t, 200)
	demo.hasNothing(drained, after.Status.VM)
	demo.kubectl("uncordon", drained)

	strength := func(strength int) {
		demo.kubectl("patch", "pvm", "shop", "--type=merge", "--patch", fmt.Sprintf(`{"spec":{"strength":%d}}`, strength))
	}
	serves := func(vm string) control.VM {
		t.Helper()
		host, err := control.New(demo.hosts.Socket(after.Status.Primary)).Status(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		there, _ := host.Find(vm)
		return there
	}
	strength(3)
	with := demo.until("it has a standby", func(vm *v1alpha1.ProtectedVM) bool { return isProtected(vm) && asAsked(vm) && vm.Status.Standby != "" })
	if said := serves(with.Status.VM); said.Standby != drained || with.Status.Standby != drained {
		t.Fatalf("node %s is free; the daemons' standby is '%s', and the object's '%s'", drained, said.Standby, with.Status.Standby)
	}
	demo.runs(3)
	clients.until(t, 200)
	strength(2)
	without := demo.until("it has none", func(vm *v1alpha1.ProtectedVM) bool { return isProtected(vm) && asAsked(vm) && vm.Status.Standby == "" })
	if said := serves(without.Status.VM); said.Standby != "" {
		t.Fatalf("the daemons' standby is '%s'", said.Standby)
	}
	demo.hasNothing(drained, without.Status.VM)

	// One that was named while the VM runs does what a standby is for.
	strength(3)
	demo.until("it has a standby again", func(vm *v1alpha1.ProtectedVM) bool {
		return isProtected(vm) && asAsked(vm) && vm.Status.Standby == drained
	})
	dead := without.Status.Backup
	demo.dies(dead)
	testbed.Until(t, "the standby has its part", func() error {
		vm := &v1alpha1.ProtectedVM{}
		if err := demo.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: "shop"}, vm); err != nil {
			return err
		}
		if !isProtected(vm) || vm.Status.Backup != drained || vm.Status.Standby != dead || vm.Status.Primary != after.Status.Primary {
			return fmt.Errorf("%+v", vm.Status)
		}
		return nil
	})
	clients.until(t, 200)
	strength(2)
	last := demo.until("the dead node is its standby no more", func(vm *v1alpha1.ProtectedVM) bool { return isProtected(vm) && asAsked(vm) && vm.Status.Standby == "" })
	clients.until(t, 200)
	demo.passes(clients, "upkeep", "DUNLIN_UPKEEP_SAYS")

	demo.kubectl("delete", "pvm", "shop", "--timeout=100s")
	pods := &v1.PodList{}
	testbed.Until(t, "its Pods are gone", func() error {
		err := demo.api.List(context.Background(), pods, client.InNamespace("default"))
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d Pods are there", len(pods.Items))
		}
		return err
	})
	if err := demo.api.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: "shop"}, last); !apierrors.IsNotFound(err) {
		t.Errorf("the object is there: %v", err)
	}
	for _, name := range demo.hosts.Names {
		if name != dead {
			demo.hasNothing(name, last.Status.VM)
		}
	}
}
