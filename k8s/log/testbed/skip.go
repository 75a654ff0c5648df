package testbed

import (
	"fmt"
	"os"
	"testing"
)

// Skip says that a test does not run here, and why. 'cargo xtask test' collects these words, as it does from tests in Rust, and tells them in its last line; in any
// other run the test fails: none is green in silence.
func Skip(t testing.TB, why string) {
	t.Helper()
	line := fmt.Sprintf("%s: %s", t.Name(), why)
	path := os.Getenv("DUNLIN_SKIPPED")
	if path == "" {
		t.Fatalf("%s ('cargo xtask test' would tell it as skipped)", line)
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatalf("%s, and it cannot be told: %v", line, err)
	}
	// One write: tests of several processes add to the file.
	_, err = file.WriteString(line + "\n")
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		t.Fatalf("%s, and it cannot be told: %v", line, err)
	}
	t.Skip(why)
}
