"""Reinforcement learning. lifecycle.py starts and ends a run, loop.py trains. main_*.py: entry points of commands."""
