"""Kernels for machines without a GPU."""
