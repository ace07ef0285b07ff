"""Record the iterations of trainer.record_steps, so that they can be replayed (replay/run.py).

rollout groups, weights and optimizer state -> recorded/step_N -> learn -> result or error, added to recorded/step_N
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from alphaapollo.config.load import save_config
from alphaapollo.launch.failures import FAILURES
from alphaapollo.observability.disk import explain_write_errors
from alphaapollo.observability.timing import Timer
from alphaapollo.observability.training_log import TrainedRow
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.trainer.replay.recording import FOLDER, LearningOutcome, RecordingInfo, write_inputs, write_outcome
from alphaapollo.trainer.run_state import LearnerState, TrainingRun
from alphaapollo.trainer.step.learn import UpdateResult, learn
from alphaapollo.trainer.step.training_batch import is_trainable
from alphaapollo.types import TrajectoryGroup

COLUMNS = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")  # in the order in which they are computed
LIBRARIES = ("torch", "transformers", "numpy")
CPU_INFO = Path("/proc/cpuinfo")


async def learn_and_record(
    run: TrainingRun, step: int, groups: list[TrajectoryGroup], timer: Timer, reused: Sequence[TrajectoryGroup] = ()
) -> UpdateResult:
    """Update the models with `learn`. If trainer.record_steps has `step`, also save the inputs and the result.

    reused: groups of earlier iterations, which are trained on as well.
    """
    everything = [*groups, *reused]
    if step not in (run.config.trainer.record_steps or ()):
        learned = await learn(run, step, everything, timer)
        return log_trained_rows(run, step, learned, groups)
    with timer("record"):
        folder = await record_update_inputs(run, step, everything)
    hint = f"To compute the iteration again: python -m alphaapollo.trainer.replay {folder}"
    try:
        learned = await learn(run, step, everything, timer)
    except FAILURES as error:
        write_outcome(folder, LearningOutcome({}, {}, {}, str(error)))
        run.console.notify(f"The inputs of iteration {step} are saved to {folder}. {hint}")
        raise
    with timer("record"), explain_write_errors("the recording", folder):
        write_outcome(folder, await collect_learning_outcome(run, step, learned))
    run.console.notify(f"Iteration {step} is recorded. {hint}")
    return log_trained_rows(run, step, learned, groups)


def log_trained_rows(
    run: TrainingRun, step: int, learned: UpdateResult, groups: Sequence[TrajectoryGroup]
) -> UpdateResult:
    """Write the trainer's log-probs and the advantages of the iteration's own groups, which are the first ones of the
    batch, to the rollout log. Returns the result without the batch, to free its memory."""
    if learned.batch:
        num_rows = sum(len(one.rows) for group in groups for one in group.trajectories if is_trainable(one))
        run.rollout_log.write_trained_rows(step, make_trained_rows(learned)[:num_rows])
    return replace(learned, batch=None, credit=None, is_trained=None, old_logprobs=[])


async def record_update_inputs(run: TrainingRun, step: int, groups: list[TrajectoryGroup]) -> Path:
    """Save everything that the update of iteration `step` depends on. Returns the folder."""
    recordings, placement = CheckpointFolder(run.config.trainer.folder / FOLDER, keep=None), run.plan.placement
    info = RecordingInfo(
        step=step,
        iterations=run.goal.max_steps,
        kl_coef=run.progress.kl_coef,
        shares_prompts=run.shares_prompts,
        ranks=placement.num_ranks,
        threads=placement.threads,
        max_tokens=run.plan.max_tokens,
        device=placement.device,
        model=run.plan.model.model_dump(mode="json"),
        machine=describe_machine(),
    )
    folder = recordings.begin_checkpoint(step)
    with explain_write_errors("the recording", folder):
        await run.saving.save_and_wait(folder)
        save_config(run.config, folder / "config.yaml")
        await asyncio.to_thread(write_inputs, folder, info, groups)
        return await asyncio.to_thread(recordings.complete_checkpoint, folder)


async def collect_learning_outcome(run: LearnerState, step: int, learned: UpdateResult) -> LearningOutcome:
    """Collect metrics, log-probs, values, advantages and weight digests of an update. Offloads policy and critic."""
    columns: dict[str, np.ndarray] = {}
    fingerprints: dict[str, tuple[str, float]] = {}
    if learned.batch and learned.credit:
        found = {name: [getattr(rank, name) for rank in learned.credit.columns] for name in COLUMNS}
        if found["old_logprobs"][0] is None and step > run.config.trainer.critic_warmup:
            found["old_logprobs"] = list(await run.workers.policy.get_old_log_probs())  # computed by the update
        is_action = learned.batch.mask != 0
        computed = {name: parts for name, parts in found.items() if parts[0] is not None}
        columns = {name: learned.batch.layout.join_columns(parts)[is_action] for name, parts in computed.items()}
    for name, role in (("policy", run.workers.policy), ("critic", run.workers.critic)):
        if role:
            fingerprints |= {f"{name} {key}": value for key, value in (await role.compute_state_fingerprints()).items()}
            await role.offload()
    return LearningOutcome(learned.metrics | {"kl/next_coef": learned.kl_coef}, fingerprints, columns)


def describe_machine() -> dict[str, str]:
    """Return the processor's name and library versions. Both can change how floats are rounded."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"processor": processor} | {name: importlib.metadata.version(name) for name in LIBRARIES}


def make_trained_rows(learned: UpdateResult) -> list[TrainedRow]:
    """Return the log-probs before the update and the advantages of the B rows of the batch.

    If the update computed the log-probs, it did so only for the rows that it trained on.
    """
    batch, credit = learned.batch, learned.credit
    assert batch and credit
    known = [rank.old_logprobs for rank in credit.columns if rank.old_logprobs is not None]
    has_logprobs = np.ones(len(batch.rows), dtype=bool) if known or learned.is_trained is None else learned.is_trained
    old = known or learned.old_logprobs
    logprobs = batch.layout.join_columns(old).astype(np.float32, copy=False) if old else None
    columns = [rank.advantages for rank in credit.columns if rank.advantages is not None]
    advantages = batch.layout.join_columns(columns).astype(np.float32, copy=False)
    identities = [
        (trajectory.prompt_id, trajectory.sample, number)
        for trajectory in batch.trajectories
        for number in range(len(trajectory.rows))
    ]
    spans = pairwise(batch.layout.response_offsets)
    return [
        TrainedRow(*identity, logprobs[start:end] if logprobs is not None and computed else None, advantages[start:end])
        for identity, computed, (start, end) in zip(identities, has_logprobs, spans, strict=True)
    ]
