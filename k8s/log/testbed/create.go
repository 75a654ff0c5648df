package testbed

import (
	"context"
	"testing"
)

// Logs makes shared logs, and takes them away: a client of [dunlin.dev/log].
type Logs interface {
	Create(ctx context.Context, log string, hosts ...string) error
	Remove(ctx context.Context, log string) error
}

// CreateLog makes a log, once more where a host had no turn for the seconds that another one waits for it.
func CreateLog(t testing.TB, ctx context.Context, client Logs, log string, hosts ...string) {
	t.Helper()
	Until(t, "log "+log+" is made", func() error {
		err := client.Create(ctx, log, hosts...)
		if err != nil {
			// What was made of it is undone first; there may be nothing.
			_ = client.Remove(ctx, log)
		}
		return err
	})
}
