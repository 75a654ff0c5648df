// Command images makes OCI images of static programs, without a registry and without a daemon: one archive for each program, which 'ctr images import',
// 'podman load' and 'skopeo' take. 'cargo xtask k8s images' calls it.
//
// The same programs make the same archives, byte by byte: whoever has two of them can tell whether they are the same image.
// Not here: what the programs are, and how they are built (xtask/src/k8s).
package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	// project begins every image's name. It is no registry: an image that is not there is not to be had anywhere.
	project = "dunlin.dev"
	// nameForContainerd is where containerd looks for the whole name; others read refName.
	nameForContainerd = "io.containerd.image.name"
	refName           = "org.opencontainers.image.ref.name"
)

// epoch is every file's time, so that the same programs make the same image.
var epoch = time.Unix(0, 0).UTC()

// about is what an image says of itself.
type about struct{ version, revision string }

// nameOf is an image's name in a cluster.
func nameOf(program, version string) string {
	return fmt.Sprintf("%s/%s:%s", project, filepath.Base(program), version)
}

// imageOf has the program alone, as it is: nothing else is in it, no shell and no library.
func imageOf(program string, about about) (v1.Image, error) {
	if err := isStatic(program); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	name := filepath.Base(program)
	var files bytes.Buffer
	writer := tar.NewWriter(&files)
	if err := add(writer, name, 0o755, data); err != nil {
		return nil, err
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(files.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	image := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	image, err = mutate.Append(image, mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "cargo xtask k8s images"}})
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Created = v1.Time{Time: epoch}
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{
		Entrypoint: []string{"/" + name}, WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title": name, "org.opencontainers.image.version": about.version, "org.opencontainers.image.revision": about.revision,
			"org.opencontainers.image.licenses": "Apache-2.0",
		},
	}
	return mutate.ConfigFile(image, config)
}

// isStatic refuses a program that needs a loader: there is none in its image.
func isStatic(program string) error {
	file, err := elf.Open(program)
	if err != nil {
		return fmt.Errorf("%s is not a program for Linux: %w", program, err)
	}
	defer file.Close()
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			return fmt.Errorf("%s is not static: build it with CGO_ENABLED=0", program)
		}
	}
	return nil
}

// write makes an archive with one image: an OCI layout, in a tar. It has its name only when it is whole.
func write(path, name string, image v1.Image) error {
	folder, err := os.MkdirTemp(filepath.Dir(path), ".making-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	index := filepath.Join(folder, "layout")
	to, err := layout.Write(index, empty.Index)
	if err != nil {
		return err
	}
	if err := to.AppendImage(image, layout.WithAnnotations(map[string]string{nameForContainerd: name, refName: name})); err != nil {
		return err
	}
	half := filepath.Join(folder, "archive")
	if err := archive(half, index); err != nil {
		return err
	}
	return os.Rename(half, path)
}

// archive is a folder as a tar, in the order of names.
func archive(path, folder string) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	writer := tar.NewWriter(file)
	// WalkDir goes in the order of names.
	err = filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path == folder {
			return err
		}
		name, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return writer.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: epoch})
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return add(writer, name, 0o644, data)
	})
	if err != nil {
		return err
	}
	return writer.Close()
}

func add(writer *tar.Writer, name string, mode int64, data []byte) error {
	if err := writer.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data)), ModTime: epoch}); err != nil {
		return err
	}
	_, err := writer.Write(data)
	return err
}
