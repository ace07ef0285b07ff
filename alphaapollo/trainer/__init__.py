"""The programs: each main_* reads a configuration and runs; the loop reads top to bottom in loop.py."""
