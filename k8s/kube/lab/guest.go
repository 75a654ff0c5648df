package lab

import (
	"os"
	"path/filepath"
	"testing"
)

// Guest makes a folder of images with the redis guest in the namespace "default", which the environment names: 'cargo xtask k8s test' does.
func Guest(t testing.TB) string {
	t.Helper()
	// QEMU runs as an ordinary user, who may look into this folder.
	folder, err := os.MkdirTemp("/var/tmp", "dunlin-images-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	inside := filepath.Join(folder, "default")
	if err := os.Mkdir(inside, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{folder, inside} {
		// Whatever the umask is.
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for variable, name := range map[string]string{"DUNLIN_GUEST_KERNEL": "vmlinuz", "DUNLIN_GUEST_INITRD": "initrd.img"} {
		data, err := os.ReadFile(os.Getenv(variable))
		if err != nil {
			t.Fatalf("%s has to name a part of the redis guest: %v", variable, err)
		}
		if err := os.WriteFile(filepath.Join(inside, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}
