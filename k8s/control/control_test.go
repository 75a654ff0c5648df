package control_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"dunlin.dev/k8s/control"
	"dunlin.dev/log"
	"dunlin.dev/log/testbed"
)

// A VM of which the first host has nothing that it needs.
const shop = `
name = "shop"
members = ["a", "b"]
witness = "c"
[vm]
memory_mib = 64
kernel = "/no/such/kernel"
`

func TestARealDaemonIsAskedAndRefuses(t *testing.T) {
	hosts := testbed.OnLoopback(t)
	hosts.Start(t)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	client := control.New(hosts.Socket("a"))
	host, err := client.Status(ctx)
	if err != nil || host.Host != "a" || len(host.VMs) != 0 {
		t.Fatalf("%+v, %v", host, err)
	}
	for _, name := range hosts.Names {
		version, err := control.New(hosts.Socket(name)).Version(ctx, name)
		if err != nil || !strings.Contains(version, ".") {
			t.Errorf("host %s: version '%s', %v", name, version, err)
		}
	}
	for what, asked := range map[string]error{
		"/no/such/kernel":                client.Up(ctx, "shop.toml", shop),
		"shop.toml":                      client.Up(ctx, "shop.toml", "name = 7"),
		"there is no VM 'shop'":          client.Down(ctx, "shop", true),
		"no VM 'shop' on this host":      client.Forget(ctx, "shop"),
		"there is no VM 'shop' on this ": client.Policy(ctx, "shop", "remus"),
	} {
		var refused *control.Refused
		if !errors.As(asked, &refused) || refused.Code != 2 || !strings.Contains(refused.Why, what) {
			t.Errorf("not refused with '%s': %v", what, asked)
		}
	}
	if err := control.New(hosts.Socket("a")+"-not").Down(ctx, "shop", true); err == nil || !strings.Contains(err.Error(), "no daemon answers at") {
		t.Errorf("nobody is there: %v", err)
	}
}

func TestWhoFollowsHearsWhatHappens(t *testing.T) {
	hosts := testbed.OnLoopback(t)
	hosts.Start(t)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	begun := time.Now().Add(-time.Second)
	enough := errors.New("enough")
	logs := log.New(hosts.Socket("a"))
	asked, heard := false, control.Event{}
	err := control.New(hosts.Socket("a")).Follow(ctx, func(event *control.Event) error {
		if event == nil {
			// It listens by now.
			if !asked {
				asked = true
				return logs.Create(ctx, "jobs", hosts.Names...)
			}
			return nil
		}
		heard = *event
		return enough
	})
	if err != enough || heard.Host != "a" || heard.Kind == "" || heard.Text == "" || heard.Time().Before(begun) {
		t.Errorf("%+v, %v", heard, err)
	}
	testbed.Until(t, "links", func() error {
		host, err := control.New(hosts.Socket("a")).Status(ctx)
		if err == nil && (len(host.Links()) != 2 || !host.Links()["b"] || !host.Links()["c"]) {
			err = errors.New("not linked yet")
		}
		return err
	})
	hosts.Kill("a")
	if err := control.New(hosts.Socket("a")).Follow(ctx, func(*control.Event) error { return nil }); err == nil {
		t.Error("a dead daemon is followed")
	}
}
