"""What all commands share: prepare a run, start its workers, publish weights, write checkpoints."""
