package crds_test

import (
	"reflect"
	"sort"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"dunlin.dev/k8s/kube/api/v1alpha1"
	"dunlin.dev/k8s/kube/crds"
)

// The Go values and the definitions name the same fields, all the way down.
func TestGoValuesAreWhatTheDefinitionsSay(t *testing.T) {
	for file, value := range map[string]any{
		"protectedvm.yaml": v1alpha1.ProtectedVM{}, "protectedprogram.yaml": v1alpha1.ProtectedProgram{},
		"dunlinhost.yaml": v1alpha1.DunlinHost{}, "replicaquota.yaml": v1alpha1.ReplicaQuota{},
	} {
		data, err := crds.Files.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var definition apiextensionsv1.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(data, &definition); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, version := range definition.Spec.Versions {
			compare(t, file, *version.Schema.OpenAPIV3Schema, reflect.TypeOf(value))
		}
	}
}

// opaque are Kubernetes' own.
var opaque = map[reflect.Type]bool{reflect.TypeOf(metav1.ObjectMeta{}): true, reflect.TypeOf(metav1.Time{}): true}

func compare(t *testing.T, where string, schema apiextensionsv1.JSONSchemaProps, of reflect.Type) {
	t.Helper()
	for of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if of.Kind() == reflect.Slice {
		if schema.Items == nil {
			t.Fatalf("%s: a list in Go only", where)
		}
		compare(t, where+"[]", *schema.Items.Schema, of.Elem())
		return
	}
	if of.Kind() == reflect.Map {
		if schema.AdditionalProperties == nil {
			t.Fatalf("%s: a map in Go only", where)
		}
		compare(t, where+"{}", *schema.AdditionalProperties.Schema, of.Elem())
		return
	}
	kinds := map[reflect.Kind]string{
		reflect.Struct: "object", reflect.String: "string", reflect.Bool: "boolean", reflect.Int: "integer", reflect.Int64: "integer",
	}
	if want := kinds[of.Kind()]; schema.Type != want && !opaque[of] {
		t.Errorf("%s: %s in Go, %s in the definition", where, of, schema.Type)
	}
	if of.Kind() != reflect.Struct || opaque[of] {
		return
	}
	fields := fieldsOf(of)
	for _, name := range names(fields, schema.Properties) {
		field, inGo := fields[name]
		property, defined := schema.Properties[name]
		if !inGo || !defined {
			t.Errorf("%s.%s: in Go %v, in the definition %v", where, name, inGo, defined)
			continue
		}
		compare(t, where+"."+name, property, field)
	}
}

func fieldsOf(of reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for at := 0; at < of.NumField(); at++ {
		field := of.Field(at)
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name != "" {
			fields[name] = field.Type
			continue
		}
		for name, inner := range fieldsOf(field.Type) {
			fields[name] = inner
		}
	}
	return fields
}

func names(fields map[string]reflect.Type, properties map[string]apiextensionsv1.JSONSchemaProps) []string {
	var all []string
	for name := range fields {
		all = append(all, name)
	}
	for name := range properties {
		if _, there := fields[name]; !there {
			all = append(all, name)
		}
	}
	sort.Strings(all)
	return all
}
