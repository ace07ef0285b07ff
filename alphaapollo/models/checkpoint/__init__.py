"""Sharded training checkpoints: snapshot, background writer, safe reader."""
