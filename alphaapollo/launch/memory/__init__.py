"""Plan the memory of a run: bytes per device at each moment of an iteration."""
