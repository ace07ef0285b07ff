"""Record iterations and compute them again without engines."""
