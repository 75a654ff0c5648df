// Package deploy has what a cluster is given: with 'kubectl apply -k' a folder of overlays, which has Dunlin's resources, who may do what, operators and schedulers.
package deploy

import _ "embed"

// RBAC is a manifest of several objects: who may do what.
//
//go:embed base/rbac.yaml
var RBAC []byte

// Scheduler is a dunlin-scheduler's file, as its Pods have it.
//
//go:embed base/scheduler-configuration.yaml
var Scheduler []byte
