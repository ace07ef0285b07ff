"""Setup of a run before its first iteration: inputs, plan, worker specs."""
