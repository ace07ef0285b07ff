"""What a command does before it starts a worker, and how it starts, restarts and ends."""
