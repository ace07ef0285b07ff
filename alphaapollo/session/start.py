"""Start the workers of a run with their monitors, and a training's folder, tracker and console."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.controller.handles import TrainingWorkerGroup
from alphaapollo.controller.launcher import launch_workers
from alphaapollo.controller.stall_monitor import StallMonitor
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs
from alphaapollo.engines.weight_sync.verification import Probe
from alphaapollo.launch.inputs import explain_missing_cluster, find_local_paths
from alphaapollo.launch.policy import PolicyPreparation
from alphaapollo.launch.prepare import Preparation
from alphaapollo.observability.timing import Timer
from alphaapollo.observability.trackers import Tracker
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.runs.resume import resume_hint
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.session.checkpoint_writer import BackgroundCheckpointWriter
from alphaapollo.session.publish import make_publisher
from alphaapollo.session.training import PolicySession, TrainingSession
from alphaapollo.utils.disk import close_all
from alphaapollo.utils.heartbeat import HEARTBEAT


@asynccontextmanager
async def open_workers(
    prepared: Preparation, specs: WorkerSpecs, timer: Timer, make_hint: Callable[[], str]
) -> AsyncIterator[WorkerGroups]:
    """Context manager that starts and monitors the workers, and stops them. make_hint: returns what a message about a
    death or a stall says about resuming."""
    trainer, paths = prepared.config.trainer, find_local_paths(prepared.config)
    paths |= {"trainer.output_dir": str(trainer.folder / "config.yaml")}
    workers: WorkerGroups | None = None
    try:
        with timer("start"):
            workers = await launch_workers(specs, resolve_controller(trainer), trainer.start_timeout, paths)
        required, device = workers.required_service_processes, specs.placement.device
        stalls = StallMonitor(workers.ranks, trainer, device, prepared.console.notify, make_hint, required)
        async with stalls:
            yield workers
    finally:
        with HEARTBEAT.record_call("stop"):
            if workers:
                await workers.close()


def begin_run_folder(prepared: Preparation) -> None:
    """Save configuration and plan in the run's folder. A previous run that this one replaces is moved aside."""
    if reason := explain_missing_cluster(prepared.config):
        raise ValueError(reason)
    if moved := prepared.start.prepare_folder(prepared.config, prepared.describe()):
        prepared.console.notify(f"the previous run of this name was moved to {moved}")


def find_trained_groups(workers: WorkerGroups) -> dict[str, TrainingWorkerGroup[Any]]:
    """Return the worker groups of trained models, by the name of their folder in a checkpoint."""
    models = {"model": getattr(workers, "trainer", None), "policy": getattr(workers, "policy", None)}
    return {name: group for name, group in {**models, "critic": workers.critic}.items() if group}


@asynccontextmanager
async def open_session(prepared: Preparation, specs: WorkerSpecs, timer: Timer) -> AsyncIterator[TrainingSession]:
    """Context manager of a training: prepare the run's folder, start and monitor the workers, and stop them."""
    config, console, folder = prepared.config, prepared.console, prepared.config.trainer.folder
    begin_run_folder(prepared)
    tracker = Tracker(config.model_dump(mode="json"), folder, console.resumed_step or 0, console.notify)
    keep, keep_best = config.trainer.max_ckpt_to_keep, config.trainer.keep_best
    checkpoints = CheckpointFolder(folder / "checkpoints", keep, keep_best, prepared.start.inputs)
    try:
        async with open_workers(prepared, specs, timer, lambda: resume_hint(folder)) as workers:
            copy_phase = workers.engines.release_kv_cache_temporarily if specs.engine_builder else nullcontext
            groups = find_trained_groups(workers)
            writer = BackgroundCheckpointWriter[Any](checkpoints, groups, console.notify, copy_phase)
            yield TrainingSession(config, workers, console, tracker, writer)
    finally:
        close_all(tracker.close)


@asynccontextmanager
async def open_policy_session(
    prepared: PolicyPreparation, specs: WorkerSpecs, timer: Timer, probe: Probe, pauses_requests: bool
) -> AsyncIterator[PolicySession]:
    """Context manager of a policy's training, with a publisher of its weights if there are engines.

    probe: verifies the published weights. pauses_requests: whether requests may be running during a publish.
    """
    async with open_session(prepared, specs, timer) as session:
        rollout_log = RolloutLog(prepared.config.trainer.folder / "rollouts")
        try:
            publisher = None
            if specs.engine_builder:
                warn = prepared.console.warn
                publisher = make_publisher(session.workers, prepared.plan, probe, pauses_requests, warn)
            yield PolicySession(**vars(session), rollout_log=rollout_log, publisher=publisher)
        finally:
            close_all(rollout_log.close)
