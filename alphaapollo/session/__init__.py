"""Ground floor of every command: prepare a run, start its workers, publish weights, write checkpoints."""
