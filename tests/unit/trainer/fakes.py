"""Fakes of the parts of a run, for the loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from alphaapollo.config.schema import Config, Model
from alphaapollo.observability.console import Console
from alphaapollo.session.progress import Progress, TrainingGoal
from alphaapollo.session.training import PolicySession
from alphaapollo.trainer.step.curriculum import PromptSampler
from alphaapollo.types import Sampling


class Log:
    """Tracker and rollout log. `lines` are the metrics of each iteration."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append({"step": step, **metrics})

    def write(self, *arguments: Any) -> None: ...

    write_trained_rows = log_samples = write


class Checkpoints:
    """Checkpoint writer whose checkpoints are complete at the next iteration. `saved` has the progress by step."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, Any]] = {}
        self.seconds: list[float] = []

    def mark_models_inconsistent(self) -> None: ...

    def mark_models_consistent(self, progress: Progress) -> None: ...

    async def save(self, progress: Progress) -> None:
        self.saved[progress.step] = asdict(progress)
        self.seconds.append(1.5)

    def pop_metrics(self) -> dict[str, float]:
        return {"checkpoint/write_seconds": self.seconds.pop()} if self.seconds else {}


async def do_nothing(*_: Any) -> None: ...


def make_plan(**fields: Any) -> Any:
    """Plan of one rank."""
    defaults = {
        "placement": SimpleNamespace(data_parallel_size=1, sequence_parallel=1, num_gpus=0),
        "model": Model(),
        "padded": False,
        "max_tokens": 16_384,
        "needs_old_logprobs": True,
        "uses_rollout_logprobs": False,
        "skips_rows_without_advantage": False,
        "sampling": Sampling(8),
        "greedy_baseline": False,
    }
    return SimpleNamespace(**defaults | fields)


def make_run_state(
    config: Config,
    prompts: Sequence[Any],
    workers: Any,
    weights: Any = None,
    checkpoint_writer: Any = None,
    **fields: Any,
) -> Any:
    """State of a run of one iteration. A loop needs `learn` and `weights`, too."""
    console = fields.setdefault("console", Console())
    writer, tracker, rollout_log = checkpoint_writer or Checkpoints(), Log(), Log()
    defaults = {
        "session": PolicySession(config, workers, console, tracker, writer, rollout_log, weights),  # type: ignore[arg-type]
        "plan": make_plan(),
        "val_prompts": prompts,
        "val_suites": [],
        "sampler": PromptSampler(prompts, config.data),
        "goal": TrainingGoal(1),
        "progress": Progress(),
        "profiler": SimpleNamespace(start_step=do_nothing),
        "metric_sources": [],
        "reward_model_scorer": None,
        "column_dtype": "float32",
        "uses_shared_prompts": False,
    }
    return SimpleNamespace(config=config, prompts=prompts, workers=workers, **defaults | fields)
