"""Environments of other packages: verifiers, OpenEnv and reasoning-gym."""
