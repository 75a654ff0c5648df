//go:build race

package controller_test

// The program is built with the race detector as these tests are.
func init() { buildFlags = append(buildFlags, "-race") }
