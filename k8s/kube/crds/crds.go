// Package crds has the resource definitions, as 'kubectl apply' takes them.
package crds

import "embed"

// Files are all of them.
//
//go:embed dunlinhost.yaml protectedprogram.yaml protectedvm.yaml replicaquota.yaml
var Files embed.FS
