"""Record the iterations of trainer.record_steps, for packages that check an update or compute it again."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shutil
import time
from pathlib import Path

from alphaapollo.batching.packing import filter_mini_batches
from alphaapollo.config.load import save_config
from alphaapollo.config.schema.trainer import Trainer
from alphaapollo.controller.placement import Placement
from alphaapollo.data.vocabulary import find_excluded_ids
from alphaapollo.models.update_record import choose_sample
from alphaapollo.observability.timing import Timer
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, parse_step
from alphaapollo.runs.group_files import write_values
from alphaapollo.runs.update_checks import Check, summarize, write_checks
from alphaapollo.trainer.replay.recording import (
    INPUTS,
    OUTCOME,
    PUBLISHED,
    Outcome,
    RecordedInputs,
    RecordedSteps,
    write_outcome,
)
from alphaapollo.trainer.run_state import LearnerState, LearnFunction, TrainingRun
from alphaapollo.trainer.step.update_result import UpdateResult
from alphaapollo.types import TrajectoryGroup
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.plugins import find_plugins, is_available

COLUMNS = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "selected_tokens")  # keys of Outcome
LIBRARIES = ("torch", "transformers", "numpy")
SAMPLE_TOKENS = 256  # number of tokens per rank whose gradients a run verifies
CPU_INFO = Path("/proc/cpuinfo")


class Recorder:
    """Wrapper of `learn` that records iterations, and verifies the first one with trainer.verify_first_iteration."""

    def __init__(self, trainer: Trainer, learn: LearnFunction):
        self.steps, self.verifies_first, self._learn = trainer.record_steps or [], trainer.verify_first_iteration, learn
        self._unpublished_recording: tuple[Path, TrainingRun] | None = None
        self._verification: asyncio.Task[None] | None = None

    async def learn(
        self, run: TrainingRun, iteration: int, groups: list[TrajectoryGroup], timer: Timer
    ) -> UpdateResult:
        """Update the models, and save the inputs and the result of an iteration that is recorded or verified."""
        await self.finish()
        verifies = iteration == 1 and self.verifies_first
        if iteration not in self.steps and not verifies:
            return await self._learn(run, iteration, groups, timer)
        with timer("record"):
            folder = await record_update_inputs(run, iteration, groups)
        if iteration in self.steps:
            hint = f" To check it: alphaapollo verify {folder}." if is_available("commands", "verify") else ""
            if is_available("commands", "replay"):
                hint += f" To repeat it: python -m alphaapollo.trainer.replay {folder}"
            run.console.notify(f"The inputs of iteration {iteration} are saved to {folder}.{hint}")
        policy, critic, sample_tokens = run.workers.policy, run.workers.critic, SAMPLE_TOKENS if verifies else 0
        await policy.begin_record(str(folder / OUTCOME / "policy"), sample_tokens)
        if critic:
            await critic.begin_record(str(folder / OUTCOME / "critic"), sample_tokens)
        learned = await self._learn(run, iteration, groups, timer)
        with timer("record"), explain_write_errors("the recording", folder):
            await policy.end_record()
            if critic:
                await critic.end_record()
            outcome = await collect_outcome(run, iteration, learned)
            write_outcome(folder, outcome, describe_steps(run, learned, sample_tokens))
        self._unpublished_recording = folder, run
        return learned

    def pop_metrics(self) -> dict[str, float]:
        """Save the engines' log-probs of the probe after the weights of a recorded iteration were published, and start
        to verify the first iteration in the background. Returns no metrics."""
        if self._unpublished_recording:
            (folder, run), self._unpublished_recording = self._unpublished_recording, None
            publisher = run.session.require_publisher()
            probe = {"token_ids": publisher.probe.token_ids, "engine_logprobs": publisher.engine_logprobs}
            replace_file(folder / PUBLISHED, [json.dumps(probe).encode()])
            if self.verifies_first and parse_step(folder) == 1:
                self._verification = asyncio.create_task(self._verify(run, folder))
        return {}

    async def finish(self) -> None:
        """Wait until the first iteration is verified."""
        if self._verification:
            await self._verification
            self._verification = None

    async def _verify(self, run: TrainingRun, folder: Path) -> None:
        """Verify a recording and report the result. Remove a recording that record_steps does not ask for."""
        started, checks = time.perf_counter(), list[Check]()
        try:
            for plugin in find_plugins("recorded_updates").values():
                checks += await asyncio.to_thread(plugin.load(), folder)
        except Exception as error:  # noqa: BLE001  e.g. a model that transformers cannot run in float64
            run.console.warn(f"the first update was not verified: {type(error).__name__}: {error}")
            return
        write_checks(run.config.trainer.folder, checks)
        passed = all(check.passed for check in checks)
        report = run.console.notify if passed else run.console.warn
        hint = f" See alphaapollo verify {folder}." if not passed and is_available("commands", "verify") else ""
        seconds = time.perf_counter() - started
        report(f"verified the update of iteration 1 in {seconds:.0f} s: {summarize(checks)} (docs/verify.md).{hint}")
        if passed and 1 not in self.steps:
            await asyncio.to_thread(shutil.rmtree, folder)


async def record_update_inputs(run: TrainingRun, iteration: int, groups: list[TrajectoryGroup]) -> Path:
    """Save everything that the update of an iteration depends on. Returns the folder."""
    recordings = CheckpointFolder(run.config.trainer.folder / "recorded", keep=None)
    model = run.plan.model
    tokenizer_source = model.path, model.tokenizer_path, model.trust_remote_code
    excluded_ids = await asyncio.to_thread(find_excluded_ids, *tokenizer_source)
    inputs = RecordedInputs(
        step=iteration,
        iterations=run.goal.max_steps,
        kl_coef=run.progress.kl_coef,
        shares_prompts=run.uses_shared_prompts,
        max_tokens=run.plan.max_tokens,
        model=model.model_dump(mode="json"),
        machine=describe_machine(run.plan.placement),
        groups=groups,
        policy_kl_coef=run.progress.policy_kl_coef,
        baseline=run.progress.baseline,
        excluded_ids=excluded_ids,
        engine_dtype=run.plan.rollout.dtype,
    )
    folder = recordings.begin_checkpoint(iteration)
    with explain_write_errors("the recording", folder):
        await run.session.checkpoint_writer.save_and_wait(folder)
        save_config(run.config, folder / "config.yaml")
        await asyncio.to_thread(write_values, folder / INPUTS, inputs)
        return await asyncio.to_thread(recordings.complete_checkpoint, folder)


def describe_steps(run: LearnerState, learned: UpdateResult, sample_tokens: int) -> RecordedSteps:
    """Return the rows of each mini-batch, whether the policy was trained on each row, and the rows to verify."""
    batch, credit, is_trained, plan = learned.batch, learned.credit, learned.is_trained, run.plan
    if batch is None or credit is None:
        return RecordedSteps([], None)
    sample: list[int] | None = None
    if sample_tokens and is_trained is not None:
        sample = []
        steps = filter_mini_batches(batch.layout, is_trained, plan.max_tokens, plan.padded)
        ranks = zip(batch.layout.rank_batches, batch.layout.row_order, steps, credit.columns, strict=True)
        for rank, order, mini_batches, columns in ranks:
            assert columns.trajectory_ids is not None
            sample += order[choose_sample(rank.rows, mini_batches, columns.trajectory_ids, sample_tokens)].tolist()
    trained_rows = None if is_trained is None else is_trained.tolist()
    return RecordedSteps(batch.layout.mini_batch_rows, trained_rows, sample)


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


def describe_machine(placement: Placement) -> JsonObject:
    """Return what can change how floats are rounded: ranks, device, threads, processor and library versions."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    ranks = {"training ranks": placement.num_ranks, "device": placement.device, "threads per rank": placement.threads}
    return ranks | {"processor": processor} | {name: importlib.metadata.version(name) for name in LIBRARIES}
