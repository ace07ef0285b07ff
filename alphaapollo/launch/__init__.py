"""Start, restart and end a command with a run folder."""
