"""Reinforcement learning: lifecycle.py starts and ends a run, loop.py trains. main_*: entry points of all commands."""
