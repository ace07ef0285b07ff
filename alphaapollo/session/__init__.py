"""The state of a running driver: its workers and their monitors, published weights, checkpoints being written."""
