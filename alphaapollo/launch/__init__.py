"""What every command does before and around its work: checks, memory plan, resume, run folder, checkpoints."""
