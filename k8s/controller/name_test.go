package controller

import (
	"strings"
	"testing"

	"dunlin.dev/log"
)

// A node's name may be longer than what a log takes as a proposer's.
func TestALongNameIsCutForTheLog(t *testing.T) {
	long := strings.Repeat("0123456789", 26)
	for name, want := range map[string]string{
		"a": "a-00000000000000ff", long[:47]: long[:47] + "-00000000000000ff", long[:48]: long[:47] + "-00000000000000ff", long[:253]: long[:47] + "-00000000000000ff",
		long[:46] + "\u00e9": long[:46] + "-00000000000000ff",
	} {
		if said := proposer(name, 255); said != want || len(said) > log.MostNameBytes {
			t.Errorf("'%s' proposes as '%s'", name, said)
		}
	}
}
