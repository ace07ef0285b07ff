"""Memory plan of a run: bytes per device at each moment of an iteration."""
