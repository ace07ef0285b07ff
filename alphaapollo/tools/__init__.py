"""Tools that a model can call in an episode, and the sandbox that runs Python code."""
