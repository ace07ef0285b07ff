"""Generation, scoring, and the metrics shared with validation."""
