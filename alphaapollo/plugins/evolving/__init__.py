"""Self-evolution at inference time; no weight is updated. See docs/evolving.md."""
