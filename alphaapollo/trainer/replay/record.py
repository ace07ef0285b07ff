"""Record the iterations of trainer.record_steps, so that they can be replayed (replay/run.py).

rollout groups, weights and optimizer state -> recorded/step_N -> learn -> result or error, added to recorded/step_N
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Collection
from pathlib import Path

import numpy as np

from alphaapollo.config.load import save_config
from alphaapollo.launch.command import REPORTED_ERRORS
from alphaapollo.observability.timing import Timer
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.trainer.replay.recording import FOLDER, LearningOutcome, RecordingInfo, write_inputs, write_outcome
from alphaapollo.trainer.run_state import LearnerState, TrainingRun
from alphaapollo.trainer.step.learn import LearnFunction, UpdateResult
from alphaapollo.types import TrajectoryGroup
from alphaapollo.utils.disk import explain_write_errors

COLUMNS = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")  # in the order in which they are computed
LIBRARIES = ("torch", "transformers", "numpy")
CPU_INFO = Path("/proc/cpuinfo")


def record_iterations(steps: Collection[int], learn: LearnFunction) -> LearnFunction:
    """Return `learn`, which also saves its inputs and its result in the iterations `steps`."""

    async def learn_and_record(
        run: TrainingRun, iteration: int, groups: list[TrajectoryGroup], timer: Timer
    ) -> UpdateResult:
        if iteration not in steps:
            return await learn(run, iteration, groups, timer)
        with timer("record"):
            folder = await record_update_inputs(run, iteration, groups)
        hint = f"To compute the iteration again: python -m alphaapollo.trainer.replay {folder}"
        try:
            learned = await learn(run, iteration, groups, timer)
        except REPORTED_ERRORS as error:
            write_outcome(folder, LearningOutcome({}, {}, {}, str(error)))
            run.console.notify(f"The inputs of iteration {iteration} are saved to {folder}. {hint}")
            raise
        with timer("record"), explain_write_errors("the recording", folder):
            write_outcome(folder, await collect_learning_outcome(run, iteration, learned))
        run.console.notify(f"Iteration {iteration} is recorded. {hint}")
        return learned

    return learn_and_record


async def record_update_inputs(run: TrainingRun, iteration: int, groups: list[TrajectoryGroup]) -> Path:
    """Save everything that the update of an iteration depends on. Returns the folder."""
    recordings, placement = CheckpointFolder(run.config.trainer.folder / FOLDER, keep=None), run.plan.placement
    info = RecordingInfo(
        step=iteration,
        iterations=run.goal.max_steps,
        kl_coef=run.progress.kl_coef,
        shares_prompts=run.uses_shared_prompts,
        ranks=placement.num_ranks,
        threads=placement.threads,
        max_tokens=run.plan.max_tokens,
        device=placement.device,
        model=run.plan.model.model_dump(mode="json"),
        machine=describe_machine(),
    )
    folder = recordings.begin_checkpoint(iteration)
    with explain_write_errors("the recording", folder):
        await run.checkpoint_writer.save_and_wait(folder)
        save_config(run.config, folder / "config.yaml")
        await asyncio.to_thread(write_inputs, folder, info, groups)
        return await asyncio.to_thread(recordings.complete_checkpoint, folder)


async def collect_learning_outcome(run: LearnerState, iteration: int, learned: UpdateResult) -> LearningOutcome:
    """Collect metrics, log-probs, values, advantages and weight digests of an update. Offloads policy and critic."""
    columns: dict[str, np.ndarray] = {}
    fingerprints: dict[str, tuple[str, float]] = {}
    if learned.batch and learned.credit:
        found = {name: [getattr(rank, name) for rank in learned.credit.columns] for name in COLUMNS}
        if found["old_logprobs"][0] is None and iteration > run.config.trainer.critic_warmup:
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
