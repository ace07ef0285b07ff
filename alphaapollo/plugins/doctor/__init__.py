"""The command doctor: whether this machine can run training."""
