package operator

import (
	"context"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"dunlin.dev/k8s/kube/api/v1alpha1"
)

// remains is an etcd that has these nodes, and these DunlinHosts.
type remains struct {
	client.Reader
	nodes, hosts string
}

func (remains remains) Get(_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	there := remains.hosts
	if _, is := object.(*v1.Node); is {
		there = remains.nodes
	}
	if !strings.Contains(there, key.Name) {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}
	return nil
}

// A host is gone for good when an administrator has said so of its node and of its DunlinHost, and nobody has heard of it for long.
func TestAHostIsDestroyedByAnAdministratorsWord(t *testing.T) {
	for _, one := range []struct {
		nodes, hosts, linked string
		after                time.Duration
		destroyed            string
		again                bool
	}{
		{"bc", "bc", "", 0, "a", false}, {"abc", "bc", "", 0, "", false}, {"bc", "abc", "", 0, "", false}, {"c", "c", "", 0, "ab", false},
		{"bc", "bc", "", time.Hour, "", true},
		// Another daemon is connected with its own.
		{"bc", "bc", "a", 0, "", false},
	} {
		known := map[string]*v1alpha1.DunlinHost{}
		for name, host := range heard("bc") {
			if strings.Contains(one.hosts, name) && name != "a" {
				known[name] = host
			}
		}
		if one.linked != "" {
			known["b"].Status.Links = []v1alpha1.Link{{Host: one.linked, Connected: true}}
		}
		placer := &placer{live: remains{nodes: one.nodes, hosts: one.hosts}, patience: &patience{after: one.after, since: map[string]time.Time{}}}
		destroyed, again, err := placer.destroyed(context.Background(), shop(), known)
		if strings.Join(destroyed, "") != one.destroyed || (again > 0) != one.again || err != nil {
			t.Errorf("%+v: %v, %v, %v", one, destroyed, again, err)
		}
	}
}

// What is gone for good serves nothing: neither as a host of the group, nor as its standby.
func TestADeletedObjectDoesNotWaitForWhatIsGoneForGood(t *testing.T) {
	alone := shop()
	alone.Status.Placement = &v1alpha1.Placement{Members: []string{"a"}, Strength: 1}
	for _, one := range []struct {
		object                 *v1alpha1.ProtectedVM
		gone, heard, destroyed string
		says                   string
	}{
		{alone, "", "", "", "kubectl delete node,dunlinhost NAME"}, {alone, "", "", "a", ""}, {alone, "", "", "b", "cannot be asked"},
		{shop(), "b", "b", "", "kubectl delete node,dunlinhost NAME"}, {shop(), "b", "b", "a", ""}, {shop(), "", "", "a", "without a majority"}, {shop(), "", "", "ac", ""},
		{shop(), "", "b", "ac", "is being ended on host 'b'"},
		{withStandby(), "ad", "ad", "", "could serve it still, since one of them may have got a part as its standby. One that is gone for good"}, {withStandby(), "ad", "ad", "c", ""},
	} {
		one.object.Status.Gone = strings.Split(one.gone, "")
		said := holdUp(one.object, heard(one.heard), strings.Split(one.destroyed, "")...)
		if (said == "") != (one.says == "") || !strings.Contains(said, one.says) {
			t.Errorf("gone '%s', heard '%s', destroyed '%s': '%s', not '%s'", one.gone, one.heard, one.destroyed, said, one.says)
		}
	}
}
