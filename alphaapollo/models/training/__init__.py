"""Optimizer steps and offloading of one sharded model."""
