//go:build race

package lab

// race is whether the tests have the race detector; programs that they start have it then, too.
const race = true
