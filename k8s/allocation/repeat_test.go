package allocation

import (
	"bytes"
	"testing"
)

// A failure prints its seed, which is of no use where the same seed gives another world.
func TestASeedRepeatsItsWorld(t *testing.T) {
	for _, seed := range seeds(t, 6, 0) {
		var logs [2][][]byte
		for try := range logs {
			world, err := play(seed, func(world *world) {
				world.pauses, world.nodeDeaths, world.controllerDeaths, world.failures, world.misfits = true, true, true, true, seed%2 == 0
			})
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			for _, indexed := range world.log {
				logs[try] = append(logs[try], indexed.entry.Encode())
			}
		}
		for at, entry := range logs[0] {
			if at >= len(logs[1]) || !bytes.Equal(entry, logs[1][at]) {
				t.Fatalf("seed %d: entry %d of %d is another one the second time: %s", seed, at, len(logs[0]), entry)
			}
		}
	}
}
