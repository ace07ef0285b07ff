"""Metrics of one iteration."""
