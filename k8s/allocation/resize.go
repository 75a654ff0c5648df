package allocation

import (
	"errors"
	"fmt"
)

// resize gives a task another R while it runs.
func (state *State) resize(resize Resize) error {
	if err := state.mayResize(resize); err != nil {
		return err
	}
	task := state.Tasks[resize.Task]
	left := state.used[task.Application].Minus(task.Demand.Times(task.Strength))
	for len(task.Copies) < resize.Strength {
		task.Copies = append(task.Copies, Copy{Phase: Missing})
	}
	task.Strength, task.Copies = resize.Strength, task.Copies[:resize.Strength]
	state.used[task.Application] = left.Plus(task.Demand.Times(task.Strength))
	return nil
}

// mayResize says why a task does not get another R, if it does not: what comes on top has to fit into the application's quota, and what goes has no place.
func (state *State) mayResize(resize Resize) error {
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
	needs, free := task.Demand.Times(resize.Strength-task.Strength), state.Offer(task.Application).Free
	if !needs.Fits(free) {
		return fmt.Errorf("with R = %d the task needs %v more; application '%s' has %v", resize.Strength, needs, task.Application, free)
	}
	return nil
}
