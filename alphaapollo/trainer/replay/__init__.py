"""Record training iterations, and compute them again without inference engines."""
