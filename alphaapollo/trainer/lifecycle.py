"""A training run from its configuration to its end.

prepare: check, read, print the plan (nothing is started)  ->  run: start the workers, resume, train, export, close
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from alphaapollo.config.load import NO_ORIGIN, Origin
from alphaapollo.config.schema import Config
from alphaapollo.data.shared_prompts import decide_prompt_sharing
from alphaapollo.data.stream import PromptStream
from alphaapollo.launch.background_checkpoint import BackgroundCheckpoint
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.cpu_threads import choose_threads
from alphaapollo.launch.input_checks import find_machine
from alphaapollo.launch.resume import StartPoint, find_start
from alphaapollo.launch.session import Session, open_session
from alphaapollo.observability.disk import close_all
from alphaapollo.observability.rollout_log import RolloutLog
from alphaapollo.observability.spans import SPANS
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.timing import Timer
from alphaapollo.observability.trackers import check_trackers
from alphaapollo.trainer.loop import train, validate_and_log
from alphaapollo.trainer.loop_async import train_async
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.progress import Progress, check_steps
from alphaapollo.trainer.publish import WeightPublisher
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.setup.inputs import Inputs, read_inputs
from alphaapollo.trainer.setup.plan import SHARING, Plan, add_memory_plan, make_plan
from alphaapollo.trainer.setup.plan_table import print_run_plan
from alphaapollo.trainer.setup.worker_specs import make_worker_specs
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer
from alphaapollo.utils.watchdog import new_run_id
from alphaapollo.weight_sync.verification import PROBE_TOLERANCE_BFLOAT16, PROBE_TOLERANCE_FLOAT32


@dataclass(frozen=True)
class PreparedRun:
    """Checked configuration, plan and inputs of a run that has not started any worker."""

    config: Config
    plan: Plan
    inputs: Inputs
    start: StartPoint

    @property
    def progress(self) -> Progress:
        """Return the progress of the checkpoint to resume, or of a new run. A fixed KL coefficient comes from the
        configuration."""
        kl = self.config.algorithm.kl_ctrl
        if self.start.checkpoint is None:
            return Progress(kl_coef=kl.kl_coef)
        progress = Progress.read(self.start.checkpoint)
        return replace(progress, kl_coef=kl.kl_coef) if kl.type == "fixed" else progress

    @property
    def is_complete(self) -> bool:
        """Whether all iterations are done and the model is exported."""
        return self.inputs.goal.is_reached(self.progress) and (
            self.start.is_exported() or not self.config.trainer.export_hf
        )


def prepare(config: Config, origin: Origin = NO_ORIGIN) -> PreparedRun:
    """Check everything that can be checked without a worker, and print the plan.

    Raises ValueError if the configuration, the data or a model cannot be used.
    """
    machine, trainer = find_machine(config.trainer), config.trainer
    config, kept_threads = choose_threads(config, machine)
    plan = make_plan(config, machine, origin)
    plan = replace(plan, notices=[*plan.notices, *kept_threads])
    check_trackers(trainer.logger)
    if trainer.keep_best and not config.data.val_files:
        raise ValueError(f"trainer.keep_best={trainer.keep_best} needs validation data. Set data.val_files.")
    start = find_start(config)
    inputs = read_inputs(config)
    check_steps("trainer.profile_steps", trainer.profile_steps or [], inputs.goal.steps)
    check_steps("trainer.record_steps", trainer.record_steps or [], inputs.goal.steps)
    plan = add_memory_plan(plan, config, machine)
    print_run_plan(plan, inputs, start, config, Terminal(highlight=False, soft_wrap=True))
    if plan.memory and plan.memory.problem:
        raise ValueError(plan.memory.problem)
    return PreparedRun(config, plan, inputs, start)


async def run(prepared: PreparedRun, progress: Progress) -> None:
    """Train to the last iteration, and end all started processes. Updates `progress` in place."""
    config, inputs, start, timer = prepared.config, prepared.inputs, prepared.start, Timer()
    specs = make_worker_specs(config, prepared.plan, new_run_id(), inputs.goal.steps, inputs.has_function)
    try:
        async with open_session(config, start, specs, (progress.step, inputs.goal.steps), timer) as session:
            ready = make_run(prepared, session, progress)
            try:
                with tune_memory():
                    await initialize_run(ready, start.checkpoint, timer)
                    await session.train(train_async(ready) if config.trainer.async_mode else train(ready), ready.saving)
                    await finish_run(ready, session)
            finally:
                close_all(ready.rollout_log.close)
            session.console.show_time_summary()
    finally:
        SPANS.take()  # drop the spans of a profiled iteration that did not end


def make_run(prepared: PreparedRun, session: Session, progress: Progress) -> TrainingRun:
    """Create the state of a run whose workers have started."""
    config, plan, inputs, workers = prepared.config, prepared.plan, prepared.inputs, session.workers
    dtypes = {plan.model.dtype, plan.rollout.dtype}
    tolerance = PROBE_TOLERANCE_FLOAT32 if dtypes == {"float32"} else PROBE_TOLERANCE_BFLOAT16
    trainer, folder = config.trainer, config.trainer.folder
    checkpoints = CheckpointFolder(folder / "checkpoints", trainer.max_ckpt_to_keep, trainer.keep_best)
    trainers = {"policy": workers.policy} | ({"critic": workers.critic} if workers.critic else {})
    scorer: RewardModelScorer | None = None
    if workers.reward_model and inputs.reward_model_tokenizer:
        scorer = RewardModelScorer(
            group=workers.reward_model,
            engines=workers.engines,
            tokenizer=inputs.reward_model_tokenizer,
            num_ranks=plan.placement.data_parallel,
            max_tokens=config.reward_model.forward_max_token_len_per_gpu * plan.placement.sequence_parallel,
            padded=plan.padded,
            weight=config.reward_model.weight,
            required=config.reward.required,
            alone=not inputs.has_function,
        )
    return TrainingRun(
        config=config,
        plan=plan,
        workers=workers,
        weights=WeightPublisher(
            workers.policy, workers.engines, inputs.probe, tolerance, trainer.async_mode is not None
        ),
        prompts=inputs.prompts,
        val_prompts=inputs.val_prompts,
        goal=inputs.goal,
        stream=PromptStream(len(inputs.prompts), config.data.seed, config.data.shuffle),
        progress=progress,
        saving=BackgroundCheckpoint(checkpoints, trainers, session.console.notice, workers.engines.cache_released),
        tracker=session.tracker,
        rollout_log=RolloutLog(folder / "rollouts"),
        console=session.console,
        profiler=StepProfiler(trainer.profile_steps or [], workers, folder, session.console),
        reward_model_scorer=scorer,
    )


async def initialize_run(run: TrainingRun, checkpoint: Path | None, timer: Timer) -> None:
    """Load the checkpoint, if any, and publish its weights to the engines, which verifies them.

    The GPUs are handed over as in each iteration (loop.py). With trainer.val_before_train a new run then validates.
    """
    for warning in await run.workers.policy.self_check_warnings():
        run.console.notice(warning)
    run.shares_prompts = run.plan.shares_prompts and await can_share_prompts(run)
    run.start_reference_prefetch()
    await run.workers.engines.sleep()
    if checkpoint:
        with SPANS("load"):
            if run.workers.critic:
                await run.workers.critic.load(str(checkpoint / "critic"))
                await run.workers.critic.offload()
            await run.workers.policy.load(str(checkpoint / "policy"))
        run.console.notice(f"resumed from {checkpoint}")
    run.console.show_phase("publish", 0, 1)
    with SPANS("publish"):
        metrics = await run.weights.publish(run.progress.step)
    if checkpoint is None:
        if run.config.trainer.val_before_train:
            with timer("validate"):
                validation = await validate_and_log(run, 0)
            metrics |= validation.metrics
            run.progress.best_accuracy = validation.accuracy
        metrics |= timer.metrics()
        run.tracker.log(0, metrics)
        run.console.show_step(0, metrics)


async def can_share_prompts(run: TrainingRun) -> bool:
    """Whether the models pass their self-checks for shared prompts. Raises ValueError if a self-check fails and the
    configuration requires shared prompts."""
    roles = [role for role in (run.workers.policy, run.workers.critic) if role]
    problems = [problem for role in roles if (problem := await role.find_sharing_error())]
    wanted = run.config.actor_rollout_ref.actor.use_prefix_grouper
    return decide_prompt_sharing(SHARING, wanted, next(iter(problems), None), run.console.notice)


async def finish_run(run: TrainingRun, session: Session) -> None:
    """Export the model, or print the command that exports it."""
    trainer, step = run.config.trainer, run.progress.step
    if step < run.goal.steps:
        run.console.notice(f"trainer.total_epochs={trainer.total_epochs} ended after {step} iterations")
    if trainer.export_hf:
        await run.workers.engines.sleep()
    await session.export(run.workers.policy, run.saving)


@contextmanager
def tune_memory() -> Iterator[None]:
    """Context manager: collect cyclic garbage rarely, and use huge pages for large matrices.

    The collector would scan every list of token ids, although there are few cycles. Its settings are restored at the
    end, because some libraries otherwise print errors. Without huge pages, matrices [B, L] spend most of their time in
    page faults. Start the workers before, because their memory plan does not include huge pages.
    """
    thresholds = gc.get_threshold()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
