package controller

import (
	"reflect"
	"testing"
	"time"

	"dunlin.dev/k8s/allocation"
)

// Whoever schedules ordinary Pods is told of each change of who leads: by an entry, by a whole state that is read in its place, and by the clock.
func TestEachChangeOfWhoLeadsIsTold(t *testing.T) {
	var told []bool
	timing := allocation.Timing{Alive: 10 * time.Millisecond, Dead: time.Hour}
	controller := &controller{
		Config: Config{Name: "a", Timing: timing, Say: func(string) {}, Leads: func(leads bool) { told = append(told, leads) }}, begun: time.Now(),
		decides: allocation.NewController("a", 1, timing, allocation.NewState(), 0, 0),
	}
	is := func(what string, want ...bool) {
		t.Helper()
		controller.tellLead()
		if !reflect.DeepEqual(told, want) {
			t.Fatalf("%s: it is told %v, not %v", what, told, want)
		}
	}
	index := uint64(0)
	read := func(entry allocation.Entry, state *allocation.State) {
		t.Helper()
		index++
		if err := controller.take(read{index: index, entry: entry, state: state}); err != nil {
			t.Fatal(err)
		}
	}
	// speaks has it say something, and read that.
	speaks := func() {
		t.Helper()
		for try := 0; try < 1000; try++ {
			for _, effect := range controller.step() {
				if effect.Propose != nil {
					read(*effect.Propose, nil)
					return
				}
			}
			time.Sleep(timing.Alive)
		}
		t.Fatal("it says nothing")
	}
	officeOf := func(name string) *allocation.State {
		state := allocation.NewState()
		state.Apply(1, allocation.Entry{By: name, Changes: []allocation.Change{{Lead: new(uint64)}}})
		return state
	}
	is("at first")
	read(allocation.Entry{}, officeOf("a"))
	is("it has read that it leads, and nobody has heard it since it began")
	speaks()
	is("it has been heard", true)
	read(allocation.Entry{}, officeOf("b"))
	is("it has read a state in which another one leads", true, false)
	read(allocation.Entry{}, officeOf("a"))
	speaks()
	is("it leads again", true, false, true)
	// Its log is not reached: nothing of what it says is agreed, and another one may lead.
	controller.begun = controller.begun.Add(-timing.Dead)
	is("it is cut off", true, false, true, false)
	if rooms := controller.decides.Rooms(controller.now()); rooms != nil {
		t.Errorf("it is cut off, and leaves %v", rooms)
	}
}
