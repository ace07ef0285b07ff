"""Decide before a run starts: memory, CPU threads, trials of data, template, environment and reward function."""
