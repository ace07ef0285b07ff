"""Prepare and run a training run.

prepare_run: check the configuration, read the data, print the plan; starts no process.
run: start the workers, resume from the last checkpoint, train, export the model, stop the workers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from alphaapollo.batching.shared_prompts import decide_shared_prompts
from alphaapollo.config.load import UserSettings
from alphaapollo.config.schema import Config
from alphaapollo.launch.input_checks import detect_node_resources
from alphaapollo.launch.session import BackgroundCheckpointWriter, TrainingSession, open_session
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import Timer
from alphaapollo.observability.trackers import check_trackers
from alphaapollo.planning.first_start import choose_cpu_threads, fix_template_date
from alphaapollo.planning.plan_table import print_plan_table
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.rollout.suites import check_suites
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.runs.resume import StartPoint, find_start_point
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.trainer.loop import list_val_suites, train, train_async, validate_and_log
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.progress import CurriculumState, Progress, RecentGroups, check_steps_within_run
from alphaapollo.trainer.publish import make_publisher
from alphaapollo.trainer.replay.record import record_iterations
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.setup.inputs import TrainingInputs, read_training_inputs
from alphaapollo.trainer.setup.plan import SHARING, Plan, add_memory_plan, make_plan, make_run_plan, make_worker_specs
from alphaapollo.trainer.step.curriculum import PromptSampler
from alphaapollo.trainer.step.learn import learn
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer
from alphaapollo.utils.disk import close_all
from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass(frozen=True)
class PreparedRun:
    """Checked configuration, plan and inputs of a run that has not started any worker."""

    config: Config
    plan: Plan
    inputs: TrainingInputs
    start: StartPoint

    @property
    def progress(self) -> Progress:
        """Progress of the checkpoint to resume from, or of a new run. A fixed KL coefficient is read from the
        configuration, so it can be changed when a run resumes. With other data, the curriculum starts from scratch, and
        groups of the earlier data are dropped."""
        kl = self.config.algorithm.kl_ctrl
        if self.start.checkpoint is None:
            return Progress(kl_coef=kl.kl_coef)
        progress = Progress.read(self.start.checkpoint)
        if self.start.has_other_data:  # prompt ids are rows of the files
            progress.curriculum = CurriculumState(stage_start=progress.prompts_consumed)
            progress.unfinished, progress.recent = [], RecentGroups()
        return replace(progress, kl_coef=kl.kl_coef) if kl.type == "fixed" else progress

    @property
    def is_complete(self) -> bool:
        """Whether all iterations are done and the model is exported."""
        return self.inputs.goal.is_reached(self.progress) and (
            self.start.has_exported_model() or not self.config.trainer.export_hf
        )


def prepare_run(config: Config, user_settings: UserSettings, console: Console) -> PreparedRun:
    """Check everything that can be checked without a worker, and print the plan.

    Raises ValueError if the configuration, the data or a model cannot be used.
    """
    machine, trainer = detect_node_resources(config), config.trainer
    config = fix_template_date(config, config.actor_rollout_ref.model)
    config, kept_threads = choose_cpu_threads(config, machine)
    plan = make_plan(config, machine, user_settings)
    plan = replace(plan, notices=[*plan.notices, *kept_threads])
    check_trackers(trainer.logger)
    if trainer.keep_best and not config.validates:
        raise ValueError(f"trainer.keep_best={trainer.keep_best} needs validation data. Set data.val_files.")
    check_suites(list_val_suites(trainer))
    start = find_start_point(config)
    inputs = read_training_inputs(config)
    check_steps_within_run("trainer.profile_steps", trainer.profile_steps or [], inputs.goal.max_steps)
    check_steps_within_run("trainer.record_steps", trainer.record_steps or [], inputs.goal.max_steps)
    plan = add_memory_plan(plan, config, machine)
    problem, warning = (plan.memory.problem, plan.memory.warning) if plan.memory else ("", "")
    run_plan, shows_memory = make_run_plan(plan, inputs, start, config), bool(trainer.dry_run or problem or warning)
    print_plan_table(trainer.folder, run_plan, console, shows_memory)
    if problem:
        raise ValueError(problem)
    return PreparedRun(config, plan, inputs, start)


async def run(prepared: PreparedRun, progress: Progress, console: Console) -> None:
    """Start the workers, train to the last iteration, and stop the workers. Updates `progress` in place."""
    config, inputs, start, timer = prepared.config, prepared.inputs, prepared.start, Timer()
    specs = make_worker_specs(config, prepared.plan, new_run_id(), inputs.goal.max_steps, inputs.has_reward_function)
    run_plan = make_run_plan(prepared.plan, inputs, start, config)
    try:
        console.start(inputs.goal.max_steps, progress.step)
        async with open_session(config, start, run_plan, specs, timer, console) as session:
            ready = make_training_run(prepared, session, progress)
            try:
                with tune_gc_and_huge_pages():
                    await initialize_run(ready, start.checkpoint, timer)
                    training = train_async(ready) if generates_ahead(config) else train(ready)
                    await session.train(training, ready.checkpoint_writer)
                    await finish_run(ready, session)
            finally:
                close_all(ready.rollout_log.close)
    finally:
        HEARTBEAT.take_spans()  # drop the spans of a profiled iteration that did not end


def generates_ahead(config: Config) -> bool:
    """Whether groups are generated while an iteration trains."""
    return config.trainer.async_mode is not None and config.trainer.max_staleness > 0


def make_training_run(prepared: PreparedRun, session: TrainingSession, progress: Progress) -> TrainingRun:
    config, plan, inputs, workers = prepared.config, prepared.plan, prepared.inputs, session.workers
    dtypes = {plan.model.dtype, plan.rollout.dtype}
    trainer, folder = config.trainer, config.trainer.folder
    keep, inputs_now = (trainer.max_ckpt_to_keep, trainer.keep_best), prepared.start.inputs
    checkpoints = CheckpointFolder(folder / "checkpoints", *keep, inputs_now)
    trainers = {"policy": workers.policy} | ({"critic": workers.critic} if workers.critic else {})
    scorer: RewardModelScorer | None = None
    if workers.reward_model and inputs.reward_model_tokenizer:
        parts = workers.reward_model, workers.engines, inputs.reward_model_tokenizer
        scorer = RewardModelScorer(
            config, plan.placement, plan.padded, *parts, is_only_reward=not inputs.has_reward_function
        )
    sampler = PromptSampler(inputs.prompts, config.data, inputs_now.data_start)
    writer = BackgroundCheckpointWriter[Progress](
        checkpoints, trainers, session.console.notify, workers.engines.release_kv_cache_temporarily
    )
    return TrainingRun(
        config=config,
        plan=plan,
        workers=workers,
        weights=make_publisher(workers, dtypes, inputs.probe, generates_ahead(config)),
        prompts=inputs.prompts,
        val_prompts=inputs.val_prompts,
        goal=inputs.goal,
        sampler=sampler,
        progress=progress,
        learn=record_iterations(trainer.record_steps or (), learn),
        checkpoint_writer=writer,
        tracker=session.tracker,
        rollout_log=RolloutLog(folder / "rollouts"),
        console=session.console,
        profiler=StepProfiler(trainer.profile_steps or [], workers, folder, session.console),
        reward_model_scorer=scorer,
        metric_sources=[sampler, writer, *([scorer] if scorer else [])],
    )


async def initialize_run(run: TrainingRun, checkpoint: Path | None, timer: Timer) -> None:
    """Load the checkpoint, if any, and send the policy's weights to the inference engines.

    On shared GPUs, the trainers free their memory before the engines use it, as in each iteration (loop.py). With
    trainer.val_before_train, a new run then validates.
    """
    for warning in await run.workers.policy.get_logprob_check_warnings():
        run.console.notify(warning)
    run.uses_shared_prompts = run.plan.uses_shared_prompts and await can_use_shared_prompts(run)
    await run.workers.engines.sleep()
    if checkpoint:
        with HEARTBEAT.record_call("load"):
            if run.workers.critic:
                await run.workers.critic.load(str(checkpoint / "critic"))
                await run.workers.critic.offload()
            await run.workers.policy.load(str(checkpoint / "policy"))
        run.console.notify(f"resumed from {checkpoint}")
    with HEARTBEAT.record_call("publish"):
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


async def can_use_shared_prompts(run: TrainingRun) -> bool:
    """Whether each prompt may be computed once for all its samples: policy and critic must pass a self-check. Raises
    ValueError if the self-check fails and the configuration requires shared prompts."""
    roles = [role for role in (run.workers.policy, run.workers.critic) if role]
    problems = [problem for role in roles if (problem := await role.get_shared_prompts_obstacle())]
    wanted = run.config.actor_rollout_ref.actor.use_prefix_grouper
    return decide_shared_prompts(SHARING, wanted, next(iter(problems), None), run.console.notify)


async def finish_run(run: TrainingRun, session: TrainingSession) -> None:
    """Export the final model if trainer.export_hf is set."""
    trainer, step = run.config.trainer, run.progress.step
    if step < run.goal.max_steps:
        run.console.notify(f"the run ended after {step} iterations, at the end of the data ({trainer.total_epochs=})")
    if trainer.export_hf:
        await run.workers.engines.sleep()
    await session.export(run.workers.policy)


@contextmanager
def tune_gc_and_huge_pages() -> Iterator[None]:
    """Context manager: run Python's cyclic garbage collector rarely, and let torch use huge pages for large matrices.

    The collector would scan every list of token ids, although there are few cycles. Its settings are restored at the
    end, because some libraries otherwise print errors. Without huge pages, most of the time of large matrix operations
    is spent in page faults. Enter after the workers have started, because their memory plan assumes normal pages.
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
