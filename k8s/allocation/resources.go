package allocation

import "fmt"

// Most bounds each amount, so that no sum of what a cluster has can overflow.
const Most = 1 << 40

// Resources are an amount of what nodes have and copies need.
type Resources struct {
	MilliCPU  int64 `json:"milliCPU"`
	MemoryMiB int64 `json:"memoryMiB"`
	DiskMiB   int64 `json:"diskMiB"`
}

// Plus returns the sum.
func (amount Resources) Plus(other Resources) Resources {
	return Resources{amount.MilliCPU + other.MilliCPU, amount.MemoryMiB + other.MemoryMiB, amount.DiskMiB + other.DiskMiB}
}

// Minus returns the difference; it may be below zero.
func (amount Resources) Minus(other Resources) Resources {
	return amount.Plus(other.Times(-1))
}

// Times returns so many of it.
func (amount Resources) Times(count int) Resources {
	n := int64(count)
	return Resources{n * amount.MilliCPU, n * amount.MemoryMiB, n * amount.DiskMiB}
}

// DividedBy returns each amount divided, rounded down; of less than nothing it returns nothing.
func (amount Resources) DividedBy(count int) Resources {
	part := func(whole int64) int64 {
		if whole < 0 {
			return 0
		}
		return whole / int64(count)
	}
	return Resources{part(amount.MilliCPU), part(amount.MemoryMiB), part(amount.DiskMiB)}
}

// OrNothing returns each amount, or 0 for one below that.
func (amount Resources) OrNothing() Resources {
	return amount.DividedBy(1)
}

// Within returns the lesser of the two in each kind.
func (amount Resources) Within(other Resources) Resources {
	lesser := func(a, b int64) int64 {
		if a < b {
			return a
		}
		return b
	}
	return Resources{
		lesser(amount.MilliCPU, other.MilliCPU), lesser(amount.MemoryMiB, other.MemoryMiB), lesser(amount.DiskMiB, other.DiskMiB),
	}
}

// Fits says whether it is no more than there is room, in each kind.
func (amount Resources) Fits(room Resources) bool {
	return amount.MilliCPU <= room.MilliCPU && amount.MemoryMiB <= room.MemoryMiB && amount.DiskMiB <= room.DiskMiB
}

// DominantShare is its largest share of a whole, as in dominant resource fairness: what is compared between applications.
func (amount Resources) DominantShare(whole Resources) float64 {
	largest := 0.0
	for _, kind := range [][2]int64{
		{amount.MilliCPU, whole.MilliCPU}, {amount.MemoryMiB, whole.MemoryMiB}, {amount.DiskMiB, whole.DiskMiB},
	} {
		if kind[1] > 0 {
			if share := float64(kind[0]) / float64(kind[1]); share > largest {
				largest = share
			}
		}
	}
	return largest
}

// Bounded returns each amount, or the bound where it is beyond one.
func (amount Resources) Bounded() Resources {
	return amount.OrNothing().Within(Resources{Most, Most, Most})
}

// fault says why it is no amount.
func (amount Resources) fault() error {
	for _, kind := range []int64{amount.MilliCPU, amount.MemoryMiB, amount.DiskMiB} {
		if kind < 0 || kind > Most {
			return fmt.Errorf("an amount is from 0 to %d, not %d", int64(Most), kind)
		}
	}
	return nil
}

func (amount Resources) String() string {
	return fmt.Sprintf("%dm CPU, %d MiB memory, %d MiB disk", amount.MilliCPU, amount.MemoryMiB, amount.DiskMiB)
}
