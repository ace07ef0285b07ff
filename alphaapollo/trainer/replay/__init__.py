"""Record training iterations and replay them without engines."""
