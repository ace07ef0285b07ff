"""Grader of code: unit tests in the sandbox."""
