"""Prepare and run a training run.

prepare_run: check the configuration, read the data, print the plan; starts no process.
run: start the workers, resume from the last checkpoint, train, export the model, stop the workers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alphaapollo.batching.shared_prompts import decide_shared_prompts
from alphaapollo.config.load import UserSettings
from alphaapollo.config.schema import Config
from alphaapollo.launch.plan import SHARING
from alphaapollo.launch.specs import make_worker_specs
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import Timer
from alphaapollo.processes.allocator import keep_freed_memory
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.session.progress import Progress
from alphaapollo.session.start import open_policy_session
from alphaapollo.session.training import PolicySession
from alphaapollo.trainer.loop import train, train_async, validate_and_log
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.replay.record import Recorder
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.setup.preparation import RlPreparation
from alphaapollo.trainer.step.curriculum import PromptSampler
from alphaapollo.trainer.step.learn import learn
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer
from alphaapollo.utils.heartbeat import HEARTBEAT


def prepare_run(config: Config, user_settings: UserSettings, console: Console) -> RlPreparation:
    """Check everything that can be checked without a worker, and print the plan.

    Raises ValueError if the configuration, the data or a model cannot be used.
    """
    return RlPreparation(config, console, user_settings).prepare()


async def run(prepared: RlPreparation, progress: Progress) -> None:
    """Start the workers, train to the last iteration, and stop the workers. Updates `progress` in place."""
    config, total, timer = prepared.config, prepared.goal.max_steps, Timer()
    specs = make_worker_specs(config, prepared.plan, new_run_id(), total, prepared.has_reward_function)
    try:
        prepared.console.start(total, progress.step)
        async with open_policy_session(prepared, specs, timer, prepared.probe, generates_ahead(config)) as session:
            recorder = Recorder(config.trainer, learn)
            training_run = make_training_run(prepared, session, progress, recorder)
            with tune_gc_and_huge_pages():
                await initialize_run(training_run, prepared.start.checkpoint, timer)
                training = train_async(training_run) if generates_ahead(config) else train(training_run)
                await session.train(training)
                await recorder.finish()
                await finish_run(training_run)
    finally:
        HEARTBEAT.take_spans()  # drop the spans of a profiled iteration that did not end


def generates_ahead(config: Config) -> bool:
    """Whether groups are generated while an iteration trains."""
    return config.trainer.async_mode is not None and config.trainer.max_staleness > 0


def make_training_run(
    prepared: RlPreparation, session: PolicySession, progress: Progress, recorder: Recorder
) -> TrainingRun:
    config, plan, workers = prepared.config, prepared.plan, session.workers
    trainer = config.trainer
    scorer: RewardModelScorer | None = None
    if workers.reward_model and prepared.reward_model_tokenizer:
        scorer_parts = workers.reward_model, workers.engines, prepared.reward_model_tokenizer
        scorer = RewardModelScorer(
            config, plan.placement, plan.padded, *scorer_parts, is_only_reward=not prepared.has_reward_function
        )
    sampler = PromptSampler(prepared.prompts, config.data, prepared.start.inputs.data_start)
    return TrainingRun(
        config=config,
        plan=plan,
        workers=workers,
        session=session,
        prompts=prepared.prompts,
        val_prompts=prepared.val_prompts,
        val_suites=prepared.val_suites,
        goal=prepared.goal,
        sampler=sampler,
        progress=progress,
        learn=recorder.learn,
        console=session.console,
        profiler=StepProfiler(trainer.profile_steps or [], workers, trainer.folder, session.console),
        reward_model_scorer=scorer,
        metric_sources=[sampler, session.checkpoint_writer, recorder, *([scorer] if scorer else [])],
    )


async def initialize_run(run: TrainingRun, checkpoint: Path | None, timer: Timer) -> None:
    """Load the checkpoint, if any, and send the policy's weights to the inference engines.

    On shared GPUs, the trainers free their memory before the engines use it, as in each iteration (loop.py). With
    trainer.val_before_train, a new run then validates.
    """
    await run.session.show_warnings()
    run.uses_shared_prompts = run.plan.uses_shared_prompts and await can_use_shared_prompts(run)
    metrics = await run.session.restore(checkpoint, run.progress.step)
    if checkpoint is None:
        if run.config.trainer.val_before_train:
            with timer("validate"):
                validation = await validate_and_log(run, 0)
            metrics |= validation.metrics
            run.progress.best_accuracy = validation.accuracy
            run.goal.early_stopping.observe(run.progress, validation.metrics)
        metrics |= timer.metrics()
        run.session.log(0, metrics)


async def can_use_shared_prompts(run: TrainingRun) -> bool:
    """Whether each prompt may be computed once for all its samples: policy and critic must pass a self-check. Raises
    ValueError if the self-check fails and the configuration requires shared prompts."""
    roles = [role for role in (run.workers.policy, run.workers.critic) if role]
    obstacles = [obstacle for role in roles if (obstacle := await role.get_shared_prompts_obstacle())]
    setting, first_obstacle = run.config.actor_rollout_ref.actor.use_prefix_grouper, next(iter(obstacles), None)
    return decide_shared_prompts(SHARING, setting, first_obstacle, run.console.notify)


async def finish_run(run: TrainingRun) -> None:
    """Export the final model if trainer.export_hf is set."""
    if reason := run.goal.describe_early_end(run.progress):
        run.console.notify(reason)
    if run.config.trainer.export_hf:
        await run.workers.engines.sleep()
    await run.session.export(run.workers.policy)


@contextmanager
def tune_gc_and_huge_pages() -> Iterator[None]:
    """Context manager: run Python's cyclic garbage collector rarely, let torch use huge pages for large matrices, and
    keep freed memory.

    The collector would scan every list of token ids, although there are few cycles. Its settings are restored at the
    end, because some libraries otherwise print errors. Without huge pages and kept memory, most of the time of large
    matrix operations is spent in page faults. Enter after the workers have started, because their memory plan assumes
    normal pages.
    """
    thresholds = gc.get_threshold()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    keep_freed_memory()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
