package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run() error {
	var into string
	var says about
	flag.StringVar(&into, "into", ".", "the folder of the archives; it is made")
	flag.StringVar(&says.version, "version", "", "the images' tag")
	flag.StringVar(&says.revision, "revision", "", "the commit that the programs are of")
	flag.Parse()
	if says.version == "" || flag.NArg() == 0 {
		return fmt.Errorf("usage: images --version TAG [--revision COMMIT] [--into FOLDER] PROGRAM...")
	}
	if err := os.MkdirAll(into, 0o755); err != nil {
		return err
	}
	for _, program := range flag.Args() {
		image, err := imageOf(program, says)
		if err != nil {
			return err
		}
		path := filepath.Join(into, filepath.Base(program)+".tar")
		name := nameOf(program, says.version)
		if err := write(path, name, image); err != nil {
			return err
		}
		digest, err := image.Digest()
		if err != nil {
			return err
		}
		fmt.Printf("%s %s %s\n", path, name, digest)
	}
	return nil
}
