"""Steps that all commands share: input checks, memory plan, resume, run folder and checkpoints."""
