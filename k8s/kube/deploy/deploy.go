// Package deploy has what a cluster is given beside Dunlin's resources: who may do what.
package deploy

import _ "embed"

// RBAC is a manifest of several objects.
//
//go:embed rbac.yaml
var RBAC []byte
