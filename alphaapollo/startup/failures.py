"""What a run on workers may end with besides bugs."""

from __future__ import annotations

from alphaapollo.controller.ranks import WorkerFailed, WorkerLost
from alphaapollo.rollout.engine import EngineError
from alphaapollo.weights.proof import WeightSyncError

FAILURES = (ValueError, OSError, ArithmeticError, EngineError, WeightSyncError, WorkerLost, WorkerFailed)
"""Each says what happened and to whom."""
