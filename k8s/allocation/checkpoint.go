package allocation

// partBytes is how much of a checkpoint an entry has: in base64 it is within what a log takes.
const partBytes = 128 << 10

// mostParts are what a log keeps.
const mostParts = 16 << 20 / partBytes

// Checkpoints returns the parts of a checkpoint of the state as of an entry.
func Checkpoints(state *State, at uint64) []Checkpoint {
	data := state.Encode()
	count := share(len(data), partBytes)
	parts := make([]Checkpoint, 0, count)
	for part := 0; part < count; part++ {
		end := (part + 1) * partBytes
		if end > len(data) {
			end = len(data)
		}
		parts = append(parts, Checkpoint{at, part, count, data[part*partBytes : end]})
	}
	return parts
}

// Loader finds the state for a controller that begins after the log was cut: it takes the entries that are kept, from the oldest on, until a
// whole checkpoint is among them. What it holds is no more than what the log keeps.
type Loader struct {
	entries []indexed
	first   uint64
	parts   map[uint64][][]byte
}

type indexed struct {
	index uint64
	entry Entry
}

// NewLoader returns one for a log whose oldest entry has this index.
func NewLoader(first uint64) *Loader {
	return &Loader{first: first, parts: map[uint64][][]byte{}}
}

// Take takes the next entry; once a whole checkpoint is there, it returns the state after this entry.
func (loader *Loader) Take(index uint64, entry Entry) (*State, error) {
	loader.entries = append(loader.entries, indexed{index, entry})
	part := entry.Checkpoint
	// What is as of an entry that was cut away with some after it is of no use.
	if part == nil || part.At+1 < loader.first || part.Parts < 1 || part.Part < 0 || part.Part >= part.Parts || part.Parts > mostParts {
		return nil, nil
	}
	parts := loader.parts[part.At]
	if len(parts) != part.Parts {
		parts = make([][]byte, part.Parts)
		loader.parts[part.At] = parts
	}
	parts[part.Part] = part.Data
	var data []byte
	for _, piece := range parts {
		if piece == nil {
			return nil, nil
		}
		data = append(data, piece...)
	}
	state, err := DecodeState(data)
	if err != nil {
		return nil, err
	}
	for _, later := range loader.entries {
		if later.index > part.At {
			state.Apply(later.index, later.entry)
		}
	}
	return state, nil
}
