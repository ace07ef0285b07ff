"""Files of a run folder, with one number for their format."""
