"""Prompts to trajectories: engines, environments that play on them, graders; no word of training."""
