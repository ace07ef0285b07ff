"""Errors of workers, as the driver reports them: deaths, stalls, failures, and memory that does not suffice."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.engines.types import EngineDied, EngineError
from alphaapollo.engines.weight_sync.verification import WeightSyncError

OUT_OF_MEMORY_HINT = (
    "To reduce memory, cheapest first: lower ppo_max_token_len_per_gpu, set model.enable_gradient_checkpointing=true, "
    "lower rollout.gpu_memory_utilization (on a CPU rollout.kv_cache_gib), raise rollout.tensor_model_parallel_size, "
    "set fsdp_config.optimizer_offload=true and param_offload=true, use more ranks (trainer.n_gpus_per_node, "
    "trainer.nnodes), set fsdp_config.offload_policy=true (docs/scaling.md lists what reduces each kind of memory; "
    "trainer.dry_run=true prints the memory of a run)."
)


CANCELLED_BY_MONITOR = "a required process died or hangs"
"""Message of a cancellation by a monitor (stall_monitor.py). A cancellation by a signal does not have it."""


class WorkerLost(RuntimeError):
    """Error: a required process died or hangs; the run can be restarted (launch/command.py).

    role: role of the process, e.g. policy. cause: what happened, without the suggested fix; default: the message."""

    def __init__(self, message: str, role: str, cause: str = ""):
        super().__init__(message)
        self.role, self.cause = role, cause or message


class WorkerDied(WorkerLost):
    """Error: a worker process or an engine core has ended. The message names the process."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.role)


class EngineCoreDied(WorkerDied):
    """Error: an engine's core process has ended. Its rollout worker runs, and can start the engine again."""


class RunStalled(WorkerLost):
    """Error: no process has made progress for trainer.stall_timeout. culprits: blocking workers, e.g. "policy 1"."""

    def __init__(self, cause: str, culprits: Sequence[str], resume_hint: str):
        role = (culprits[0].rpartition(" ")[0] or culprits[0]) if culprits else ""
        super().__init__(f"{cause}; {resume_hint}.", role, cause)
        self.culprits = list(culprits)


class WorkerFailed(RuntimeError):
    """Error: a worker raised an exception. The message names the worker and, for bugs, includes the traceback."""


REPORTED_ERRORS = (ValueError, OSError, ArithmeticError, EngineError, WeightSyncError, WorkerLost, WorkerFailed)
"""Errors with a message for the user, which are reported without a traceback; any other error is a bug."""


def explain_worker_error(worker: str, role: str, cause: BaseException, trace: str) -> Exception:
    """Return the exception to raise on the driver for an exception of a worker. worker: name of the worker, e.g. `the
    policy worker of rank 1`. trace: the traceback, shown for bugs."""
    if isinstance(cause, ValueError):  # invalid input; the message has the fix
        return ValueError(str(cause))
    if isinstance(cause, EngineDied):
        return EngineCoreDied(f"{worker} failed: {cause}", role)
    if isinstance(cause, (OSError, ArithmeticError, EngineError)):  # expected errors; the message explains them
        return WorkerFailed(f"{worker} failed: {cause}")
    if type(cause).__name__ == "OutOfMemoryError":  # by name, because the driver's torch may not have this class
        return WorkerFailed(f"{worker}: {cause} {OUT_OF_MEMORY_HINT}")
    return WorkerFailed(f"{worker} failed, which is a bug:\n{trace}")
