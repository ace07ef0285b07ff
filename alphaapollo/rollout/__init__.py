"""Rollout: prompts to graded trajectories, with engines, environments and reward functions. Independent of training."""
