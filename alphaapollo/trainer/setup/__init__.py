"""Preparation of a training run before its first iteration: settings, input data, and the workers to start."""
