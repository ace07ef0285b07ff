"""Code graded by unit tests in the sandbox."""
