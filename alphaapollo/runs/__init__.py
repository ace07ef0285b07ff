"""Files of a run folder: reading and writing them."""
