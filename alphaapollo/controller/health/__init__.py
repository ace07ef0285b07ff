"""Stall detection and process monitoring."""
