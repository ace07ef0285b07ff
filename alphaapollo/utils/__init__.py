"""Process and file helpers that every package may use."""
