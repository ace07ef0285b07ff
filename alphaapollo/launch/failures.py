"""Expected errors of a run with workers."""

from __future__ import annotations

from alphaapollo.controller.ranks import WorkerFailed, WorkerLost
from alphaapollo.engines.protocol import EngineError
from alphaapollo.weight_sync.verification import WeightSyncError


class RestartRefused(RuntimeError):
    """A worker died and the run was not restarted. The message has the reason."""


FAILURES = (
    ValueError,
    OSError,
    ArithmeticError,
    EngineError,
    WeightSyncError,
    WorkerLost,
    WorkerFailed,
    RestartRefused,
)
"""Errors with a message for the user; any other error is a bug."""
