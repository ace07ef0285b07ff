"""Metrics of trajectories: of an iteration's rollouts, and of evaluated samples (avg@n, pass@k, intervals)."""
