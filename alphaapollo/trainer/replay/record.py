"""Record the iterations of trainer.record_steps (docs/replay.md), so that they can be replayed (replay/run.py).

<run>/recorded/step_000003/   written completely before the update; manifest.json has the digest of each file
    config.yaml               configuration of the run
    inputs.pickle             RecordedInputs: rollout groups, values of `auto` settings, machine
    policy/  critic/          as in a checkpoint: weights, optimizer moments, reference if it was reset
    outcome/                  written after the update: outcome.pickle and a second manifest
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphaapollo.config.load import save_config
from alphaapollo.controller.placement import Placement
from alphaapollo.observability.timing import Timer
from alphaapollo.runs.checkpoint_folder import MANIFEST, CheckpointFolder, check_format, find_damage, write_manifest
from alphaapollo.runs.group_files import read_pickle, write_pickle
from alphaapollo.trainer.run_state import LearnerState, LearnFunction, TrainingRun
from alphaapollo.trainer.step.update_result import UpdateResult
from alphaapollo.types import JsonObject, TrajectoryGroup
from alphaapollo.utils.disk import explain_write_errors

INPUTS, OUTCOME = "inputs.pickle", "outcome"
COLUMNS = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")  # in the order in which they are computed
LIBRARIES = ("torch", "transformers", "numpy")
CPU_INFO = Path("/proc/cpuinfo")
Value = float | np.ndarray | tuple[str, float]
"""Metric, column of the action tokens in row order, or (digest, norm) of weights or optimizer moments."""
Outcome = dict[str, Value]
"""Result of an iteration's update, in the order of computation."""


@dataclass(frozen=True)
class RecordedInputs:
    """Everything that an update depends on, besides weights and configuration."""

    step: int
    iterations: int  # total of the run, for learning rate schedules
    kl_coef: float  # coefficient of the KL penalty in the reward
    shares_prompts: bool
    max_tokens: int  # token budget of a micro-batch
    model: JsonObject  # resolved section of the policy's model
    machine: dict[str, Any]  # of describe_machine
    groups: list[TrajectoryGroup]
    policy_kl_coef: float | None = None  # as in Progress
    baseline: float | None = None  # as in Progress


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
        run.console.notify(f"The inputs of iteration {iteration} are saved to {folder}. {hint}")
        learned = await learn(run, iteration, groups, timer)
        with timer("record"), explain_write_errors("the recording", folder):
            write_outcome(folder, await collect_outcome(run, iteration, learned))
        return learned

    return learn_and_record


async def record_update_inputs(run: TrainingRun, iteration: int, groups: list[TrajectoryGroup]) -> Path:
    """Save everything that the update of an iteration depends on. Returns the folder."""
    recordings = CheckpointFolder(run.config.trainer.folder / "recorded", keep=None)
    inputs = RecordedInputs(
        step=iteration,
        iterations=run.goal.max_steps,
        kl_coef=run.progress.kl_coef,
        shares_prompts=run.uses_shared_prompts,
        max_tokens=run.plan.max_tokens,
        model=run.plan.model.model_dump(mode="json"),
        machine=describe_machine(run.plan.placement),
        groups=groups,
        policy_kl_coef=run.progress.policy_kl_coef,
        baseline=run.progress.baseline,
    )
    folder = recordings.begin_checkpoint(iteration)
    with explain_write_errors("the recording", folder):
        await run.session.checkpoint_writer.save_and_wait(folder)
        save_config(run.config, folder / "config.yaml")
        await asyncio.to_thread(write_pickle, folder / INPUTS, vars(inputs))
        return await asyncio.to_thread(recordings.complete_checkpoint, folder)


def write_outcome(recording: Path, outcome: Outcome) -> None:
    """Add an update's result to its recording."""
    folder = recording / OUTCOME
    folder.mkdir()
    write_pickle(folder / "outcome.pickle", outcome)
    write_manifest(folder)


def read_recording(folder: Path) -> tuple[RecordedInputs, Outcome]:
    """Read and verify a recorded iteration. The outcome is empty if the run ended before. Raises ValueError if the
    recording is missing or damaged, or has an unsupported format."""
    check_format(folder)
    if not (folder / INPUTS).is_file() or not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} is not a complete recording of an iteration. Use a folder <run>/recorded/step_N, which "
            "trainer.record_steps=[N] writes. Only alphaapollo 0.2.0 reads recordings with a file groups.msgpack."
        )
    has_outcome = (folder / OUTCOME / MANIFEST).is_file()
    problems = find_damage(folder) + (find_damage(folder / OUTCOME) if has_outcome else [])
    if problems:
        raise ValueError(f"{folder} is damaged: {', '.join(problems)}. Use an intact copy, or a new recording.")
    outcome = read_pickle(folder / OUTCOME / "outcome.pickle") if has_outcome else {}
    return RecordedInputs(**read_pickle(folder / INPUTS)), outcome


async def collect_outcome(run: LearnerState, iteration: int, learned: UpdateResult) -> Outcome:
    """Collect metrics, log-probs, values, advantages and weight digests of an update. Offloads policy and critic."""
    values: Outcome = {}
    if learned.batch and learned.credit:
        columns = {name: [getattr(rank, name) for rank in learned.credit.columns] for name in COLUMNS}
        if columns["old_logprobs"][0] is None and iteration > run.config.trainer.critic_warmup:
            columns["old_logprobs"] = list(await run.workers.policy.get_old_log_probs())  # computed by the update
        is_action = learned.batch.mask != 0
        computed = {name: parts for name, parts in columns.items() if parts[0] is not None}
        values |= {name: learned.batch.layout.join_columns(parts)[is_action] for name, parts in computed.items()}
    values |= learned.metrics | {"kl/next_coef": learned.feedback.kl_coef}
    for name, role in (("policy", run.workers.policy), ("critic", run.workers.critic)):
        if role:
            values |= {f"{name} {key}": value for key, value in (await role.compute_state_fingerprints()).items()}
            await role.offload()
    return values


def describe_machine(placement: Placement) -> dict[str, Any]:
    """Return what can change how floats are rounded: ranks, device, threads, processor and library versions."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    here = {"training ranks": placement.num_ranks, "device": placement.device, "threads per rank": placement.threads}
    return here | {"processor": processor} | {name: importlib.metadata.version(name) for name in LIBRARIES}
