package lab

import (
	"context"
	"fmt"
	"io/fs"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"dunlin.dev/k8s/kube/crds"
	"dunlin.dev/log/testbed"
)

// Install gives it Dunlin's resources, and waits until it serves them.
func (plane *Plane) Install(t testing.TB) {
	t.Helper()
	client, err := apiextensions.NewForConfig(plane.Config())
	if err != nil {
		t.Fatal(err)
	}
	definitions := client.ApiextensionsV1().CustomResourceDefinitions()
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	files, err := fs.Glob(crds.Files, "*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no definitions: %v", err)
	}
	for _, file := range files {
		data, err := crds.Files.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var definition apiextensionsv1.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(data, &definition); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if _, err := definitions.Create(ctx, &definition, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		testbed.Until(t, file+" is served", func() error {
			now, err := definitions.Get(ctx, definition.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, condition := range now.Status.Conditions {
				if condition.Type == apiextensionsv1.Established && condition.Status == apiextensionsv1.ConditionTrue {
					return nil
				}
			}
			return fmt.Errorf("conditions are %v", now.Status.Conditions)
		})
	}
}
