"""Start, restart and end a command: input checks, workers, background checkpoint, export."""
