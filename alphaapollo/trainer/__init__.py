"""Reinforcement learning: lifecycle.py starts and ends a run, loop.py is its loop. main_*: doors of all commands."""
