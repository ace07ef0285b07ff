"""Loops of one's own: `alphaapollo.Trainer` calls the workers of main_ppo one verb at a time (docs/own_loop.md)."""
