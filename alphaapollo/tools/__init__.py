"""What a model may call while it thinks, and the sandbox that its code runs in."""
