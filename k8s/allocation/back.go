package allocation

// Copies whose node was gone, and that are there again with it.

// returns are of copies that have no place since their node was gone, and are seen where they were, on a node that is there again. They stay: nothing else of the task is
// placed before that is agreed.
func (controller *Controller) returns() (changes []Change) {
	living := controller.state.living()
	for _, binding := range controller.cluster.Bound {
		if !controller.waitsFor(binding) || controller.underWay[binding] || len(living) == 0 {
			continue
		}
		task, place := controller.state.Tasks[binding.Task], Place{binding.Node, living[len(changes)%len(living)]}
		if controller.state.mayBeOn(task, place) == nil {
			changes = append(changes, Change{Return: &Return{binding.Task, binding.Copy, place, binding.Ticket}})
		}
	}
	return changes
}

// waitsFor says whether something is bound where the copy was last, which has no other place by now. If its node is gone, it may be that all are, and that they come
// back with what they have.
func (controller *Controller) waitsFor(binding Binding) bool {
	task := controller.state.Tasks[binding.Task]
	if task == nil || task.Ending || task.Strength == 1 || binding.Copy < 0 || binding.Copy >= len(task.Copies) {
		return false
	}
	copy := task.Copies[binding.Copy]
	return copy.Phase == Missing && copy.Ticket == binding.Ticket && binding.Ticket > 0
}

// comesBack asks nothing about room, as a fact does: the copy has what it needs there.
func (state *State) comesBack(index uint64, back Return) error {
	task := state.Tasks[back.Task]
	if task == nil || back.Copy < 0 || back.Copy >= len(task.Copies) {
		return errNoTask
	}
	if copy := task.Copies[back.Copy]; task.Ending || task.Strength == 1 || copy.Phase != Missing || copy.Ticket != back.Ticket || back.Ticket == 0 {
		return errLate
	}
	if err := state.mayBeOn(task, back.Place); err != nil {
		return err
	}
	task.Copies[back.Copy] = Copy{back.Place, Bound, back.Ticket, index}
	state.hold(task, back.Node, 1)
	return nil
}
