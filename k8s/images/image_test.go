package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

var says = about{version: "1.2.3", revision: "0123456789abcdef"}

// program builds a small one, with a loader or without.
func program(t *testing.T, cgo string) string {
	t.Helper()
	folder := t.TempDir()
	source := filepath.Join(folder, "main.go")
	// What has a name to look up is linked with the system's library where cgo may do that.
	text := "package main\n\nimport (\n\t\"fmt\"\n\t\"net\"\n)\n\nfunc main() { fmt.Println(net.LookupHost(\"localhost\")) }\n"
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "small")
	build := exec.Command("go", "build", "-trimpath", "-o", path, source)
	build.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

func archiveOf(t *testing.T, path string) string {
	t.Helper()
	image, err := imageOf(path, says)
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "small.tar")
	if err := write(archive, nameOf(path, says.version), image); err != nil {
		t.Fatal(err)
	}
	return archive
}

// unpack makes an archive's folder.
func unpack(t *testing.T, archive string) string {
	t.Helper()
	file, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	folder := t.TempDir()
	for reader := tar.NewReader(file); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return folder
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(folder, header.Name)
		if header.Typeflag == tar.TypeDir {
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			continue
		}
		data, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// read is the one image of an archive, and its name there.
func read(t *testing.T, archive string) (v1.Image, string) {
	t.Helper()
	index, err := layout.ImageIndexFromPath(unpack(t, archive))
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 {
		t.Fatalf("%v, %+v", err, manifest)
	}
	image, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	return image, manifest.Manifests[0].Annotations[nameForContainerd]
}

func TestAnImageIsItsProgramAlone(t *testing.T) {
	path := program(t, "0")
	image, name := read(t, archiveOf(t, path))
	// All digests and sizes are what the manifest says.
	if err := validate.Image(image); err != nil {
		t.Fatal(err)
	}
	if name != "dunlin.dev/small:1.2.3" {
		t.Errorf("it is called %s", name)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Join(config.Config.Entrypoint, " ") != "/small" || config.OS != "linux" || config.Config.Labels["org.opencontainers.image.revision"] != says.revision {
		t.Errorf("%+v", config)
	}
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%v, %d layers", err, len(layers))
	}
	files, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	reader := tar.NewReader(files)
	header, err := reader.Next()
	if err != nil || header.Name != "small" || header.Mode != 0o755 {
		t.Fatalf("%v, %+v", err, header)
	}
	inside, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	if outside, err := os.ReadFile(path); err != nil || !bytes.Equal(inside, outside) {
		t.Errorf("%v, %d bytes, and the program has %d", err, len(inside), len(outside))
	}
	if more, err := reader.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("%v, %+v", err, more)
	}
}

func TestTheSameProgramMakesTheSameArchive(t *testing.T) {
	path := program(t, "0")
	first, err := os.ReadFile(archiveOf(t, path))
	if err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(archiveOf(t, path))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Error("two archives of one program differ")
	}
}

func TestWhatNeedsALoaderIsRefused(t *testing.T) {
	if _, err := imageOf(program(t, "1"), says); err == nil || !strings.Contains(err.Error(), "is not static: build it with CGO_ENABLED=0") {
		t.Errorf("%v", err)
	}
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := imageOf(text, says); err == nil || !strings.Contains(err.Error(), "is not a program for Linux") {
		t.Errorf("%v", err)
	}
}
