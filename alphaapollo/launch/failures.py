"""What a run on workers may end with besides bugs."""

from __future__ import annotations

from alphaapollo.controller.ranks import WorkerFailed, WorkerLost
from alphaapollo.engines.protocol import EngineError
from alphaapollo.weight_sync.verification import WeightSyncError


class NotRestarted(RuntimeError):
    """Somebody has died, and the run has ended with it; says who, and why it is not started anew."""


FAILURES = (ValueError, OSError, ArithmeticError, EngineError, WeightSyncError, WorkerLost, WorkerFailed, NotRestarted)
"""Each says what happened and to whom."""
