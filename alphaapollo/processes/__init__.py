"""Processes: their start and end, time limits, locks, temporary folders and addresses."""
