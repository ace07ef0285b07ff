"""Files of a run folder: checkpoints, saved configuration, plan, history, model; one number for their format."""
