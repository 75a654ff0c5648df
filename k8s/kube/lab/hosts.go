package lab

import (
	"context"
	"testing"

	"dunlin.dev/log"
	"dunlin.dev/log/testbed"
)

// LogName is the shared log's.
const LogName = "tripod"

// BeginLog makes the shared log of the first three daemons, which run, for schedulers.
func BeginLog(t testing.TB, hosts *testbed.Hosts) *log.Client {
	t.Helper()
	client := log.New(hosts.Sockets("a")...)
	ctx, end := context.WithTimeout(context.Background(), testbed.Patience)
	defer end()
	testbed.CreateLog(t, ctx, client, LogName, hosts.Names[:3]...)
	return client
}
