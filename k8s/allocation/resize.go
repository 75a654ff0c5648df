package allocation

import (
	"errors"
	"fmt"
)

// resize gives a task another R while it runs.
func (state *State) resize(resize Resize) error {
	task := state.Tasks[resize.Task]
	if task == nil {
		return errNoTask
	}
	if err := state.mayResize(resize, state.Offer(task.Application).Free); err != nil {
		return err
	}
	left := state.used[task.Application].Minus(task.Demand.Times(task.Strength))
	for len(task.Copies) < resize.Strength {
		task.Copies = append(task.Copies, Copy{Phase: Missing})
	}
	task.Strength, task.Copies = resize.Strength, task.Copies[:resize.Strength]
	state.used[task.Application] = left.Plus(task.Demand.Times(task.Strength))
	return nil
}

// mayResize says why a task does not get another R, if it does not, with so much of its application's quota free: what comes on top has to fit into it, and what
// goes has no place.
func (state *State) mayResize(resize Resize, free Resources) error {
	task := state.Tasks[resize.Task]
	switch {
	case task == nil:
		return errNoTask
	case task.Ending:
		return errors.New("the task ends")
	case task.Strength < 2 || resize.Strength < 2 || task.Strength == resize.Strength:
		return fmt.Errorf("a task with R = %d does not get R = %d", task.Strength, resize.Strength)
	}
	for at := resize.Strength; at < len(task.Copies); at++ {
		if task.Copies[at].Phase != Missing {
			return fmt.Errorf("copy %d has a place", at)
		}
	}
	if resize.Strength < task.Strength {
		return nil
	}
	application := state.Applications[task.Application]
	if application == nil || resize.Strength > application.MostStrength || resize.Strength > len(state.Controllers) {
		return fmt.Errorf("R = %d is more than application '%s' may have, or there are controllers", resize.Strength, task.Application)
	}
	if needs := state.more(resize); !needs.Fits(free) {
		return fmt.Errorf("with R = %d the task needs %v more; application '%s' has %v", resize.Strength, needs, task.Application, free)
	}
	return nil
}

// more is what a task needs on top of what it has, to have another R.
func (state *State) more(resize Resize) Resources {
	task := state.Tasks[resize.Task]
	if task == nil {
		return Resources{}
	}
	return task.Demand.Times(resize.Strength - task.Strength).OrNothing()
}
