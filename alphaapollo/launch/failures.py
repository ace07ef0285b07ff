"""Expected errors of a run with workers, which are reported without a traceback."""

from __future__ import annotations

from alphaapollo.controller.ranks import WorkerFailed, WorkerLost
from alphaapollo.engines.protocol import EngineError
from alphaapollo.weight_sync.verification import WeightSyncError


class RestartRefused(RuntimeError):
    """Error of a run that was not restarted after the death of a worker. The message says why."""


REPORTED_ERRORS = (
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
