"""Iterations that are recorded (trainer.record_steps), to be replayed (replay.py).

groups, trainers as they are -> recorded/step_N -> learn -> what came out, or what it ended with, beside them
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from dataclasses import replace
from pathlib import Path

import numpy as np

from alphaapollo.config.load import save_config
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.failures import FAILURES
from alphaapollo.observability.disk import writing
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.replay.recording import FOLDER, About, Outcome, write_inputs, write_outcome
from alphaapollo.trainer.run_state import Learner, Run
from alphaapollo.trainer.step.learn import Learned, learn
from alphaapollo.types import TrajectoryGroup

COLUMNS = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")  # in the order in which they are made
LIBRARIES = ("torch", "transformers", "numpy")
CPU_INFO = Path("/proc/cpuinfo")


async def learn_recorded(run: Run, step: int, groups: list[TrajectoryGroup], timer: Timer) -> Learned:
    """As `learn`; of the iterations in trainer.record_steps all that it gets is kept, and what came out."""
    if step not in (run.config.trainer.record_steps or ()):
        learned = await learn(run, step, groups, timer)
        return replace(learned, batch=None, credit=None)  # nobody else wants their memory
    with timer("record"):
        folder = await keep_inputs(run, step, groups)
    try:
        learned = await learn(run, step, groups, timer)
    except FAILURES as error:
        write_outcome(folder, Outcome({}, {}, {}, str(error)))
        run.console.notice(f"what iteration {step} got lies in {folder}; {how_to_replay(folder)}")
        raise
    with timer("record"), writing("the recording", folder):
        write_outcome(folder, await outcome_of(run, step, learned))
    run.console.notice(f"iteration {step} is recorded; {how_to_replay(folder)}")
    return replace(learned, batch=None, credit=None)


def how_to_replay(folder: Path) -> str:
    return f"to compute it again: python -m alphaapollo.trainer.replay {folder}"


async def keep_inputs(run: Run, step: int, groups: list[TrajectoryGroup]) -> Path:
    """Write all that the learning of iteration `step` depends on. The folder, whole"""
    recordings, placement = CheckpointFolder(run.plan.folder / FOLDER, keep=None), run.plan.placement
    about = About(
        step=step,
        iterations=run.goal.steps,
        kl_coef=run.progress.kl_coef,
        shares_prompts=run.shares_prompts,
        reference_ahead=run.reference is not None,
        ranks=placement.num_ranks,
        threads=placement.threads,
        device=placement.device,
        model=run.plan.model.model_dump(mode="json"),
        machine=find_machine_words(),
    )
    folder = recordings.begin(step)
    with writing("the recording", folder):
        await run.saving.save_now(folder)
        save_config(run.config, folder / "config.yaml")
        await asyncio.to_thread(write_inputs, folder, about, groups)
        return await asyncio.to_thread(recordings.finish, folder)


async def outcome_of(run: Learner, step: int, learned: Learned) -> Outcome:
    """What came out of an iteration's learning; the trainers rest."""
    columns: dict[str, np.ndarray] = {}
    fingerprints: dict[str, tuple[str, float]] = {}
    if learned.batch and learned.credit:
        made = {name: [getattr(rank, name) for rank in learned.credit.columns] for name in COLUMNS}
        if made["old_logprobs"][0] is None and step > run.config.trainer.critic_warmup:
            made["old_logprobs"] = list(await run.crew.policy.old_log_probs())  # those that the update took
        acted = learned.batch.mask.numpy() != 0
        there = {name: parts for name, parts in made.items() if parts[0] is not None}
        columns = {name: learned.batch.layout.to_matrix(parts)[acted] for name, parts in there.items()}
    for name, role in (("policy", run.crew.policy), ("critic", run.crew.critic)):
        if role:
            fingerprints |= {f"{name} {what}": value for what, value in (await role.fingerprint()).items()}
            await role.rest()
    return Outcome(learned.metrics | {"kl/next_coef": learned.kl_coef}, fingerprints, columns)


def find_machine_words() -> dict[str, str]:
    """What the bits of a computation on this machine depend on."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"processor": processor} | {name: importlib.metadata.version(name) for name in LIBRARIES}
