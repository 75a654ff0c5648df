package nodes

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tunables are those of the machine's kernel that a kubelet sets, and leaves.
var tunables = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
}

// keepTunables has them be what they were when the test ends.
func keepTunables(t testing.TB) {
	t.Helper()
	for _, name := range tunables {
		path := filepath.Join("/proc/sys", name)
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.WriteFile(path, before, 0o644); err != nil {
				t.Error(err)
			}
		})
	}
}

// sweep removes a node's control groups: who was killed leaves them, with nothing in them.
func sweep(name string) {
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		roots, _ := filepath.Glob(pattern + name)
		for _, root := range roots {
			var folders []string
			_ = filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
				if err == nil && entry.IsDir() {
					folders = append(folders, path)
				}
				return nil
			})
			// The deepest first.
			slices.SortFunc(folders, func(one, other string) int { return strings.Count(other, "/") - strings.Count(one, "/") })
			for _, folder := range folders {
				_ = os.Remove(folder) // one that is in use is not this node's any more
			}
		}
	}
}
