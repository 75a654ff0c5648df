package v1alpha1

// Labels of a task's Pods, by which the scheduler knows them. Operators write them without knowing anything else of it.
const (
	// StrengthLabel is R, on each Pod of a task. Pods without it, or with "1", are ordinary ones.
	StrengthLabel = "dunlin.dev/strength"
	// TaskLabel is the same on all Pods of a task, and in its namespace on no others.
	TaskLabel = "dunlin.dev/task"
	// CopyLabel tells a task's Pods apart: from 0 to R - 1.
	CopyLabel = "dunlin.dev/copy"
)
