"""Self-evolution at inference time: no weight is trained. The map is in docs/evolving.md; read records.py first."""
