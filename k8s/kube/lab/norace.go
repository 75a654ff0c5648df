//go:build !race

package lab

const race = false
