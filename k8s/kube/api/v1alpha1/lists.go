package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// ProtectedVMList is many.
//
// +kubebuilder:object:root=true
type ProtectedVMList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ProtectedVM `json:"items"`
}

// ProtectedProgramList is many.
//
// +kubebuilder:object:root=true
type ProtectedProgramList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ProtectedProgram `json:"items"`
}

// DunlinHostList is many.
//
// +kubebuilder:object:root=true
type DunlinHostList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []DunlinHost `json:"items"`
}

// ReplicaQuotaList is many.
//
// +kubebuilder:object:root=true
type ReplicaQuotaList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ReplicaQuota `json:"items"`
}

// AddToScheme makes a scheme know them.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(Version, &ProtectedVM{}, &ProtectedVMList{}, &ProtectedProgram{}, &ProtectedProgramList{},
		&DunlinHost{}, &DunlinHostList{}, &ReplicaQuota{}, &ReplicaQuotaList{})
	metav1.AddToGroupVersion(scheme, Version)
	return nil
}
