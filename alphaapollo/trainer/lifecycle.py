"""From a configuration to a running loop and back to an empty machine.

prepare: read, check, print the plan (nothing is started)  ->  run: start the workers, resume, train, export, close
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path

from alphaapollo.algorithms.kl import make_kl_controller
from alphaapollo.config.diff import ChangeRule
from alphaapollo.config.load import NO_ORIGIN, Origin
from alphaapollo.config.notices import ACTOR
from alphaapollo.config.schema import Config, KLController
from alphaapollo.controller.crew import Crew
from alphaapollo.controller.local import launch_local
from alphaapollo.controller.nodes import RUN_FOLDER
from alphaapollo.data.stream import PromptStream
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.cpu_threads import settle_threads
from alphaapollo.launch.input_checks import find_machine, local_paths, missing_cluster
from alphaapollo.launch.monitor import watched
from alphaapollo.launch.resume import Start, find_start
from alphaapollo.observability.console import Console
from alphaapollo.observability.disk import close_all
from alphaapollo.observability.rollout_log import RolloutLog
from alphaapollo.observability.spans import SPANS
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.timing import Timer
from alphaapollo.observability.trackers import Tracker, check_trackers, make_tracker
from alphaapollo.trainer.loop import train, validate_now
from alphaapollo.trainer.loop_async import train_async
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.progress import Progress, check_steps
from alphaapollo.trainer.run_state import Run
from alphaapollo.trainer.saving import Saving
from alphaapollo.trainer.setup.inputs import Inputs, read_inputs
from alphaapollo.trainer.setup.plan import Plan, make_plan, with_memory
from alphaapollo.trainer.setup.plan_table import print_plan
from alphaapollo.trainer.setup.resume_rule import change_rule_of
from alphaapollo.trainer.setup.roles import make_roles
from alphaapollo.trainer.step.trained_reward import TrainedReward
from alphaapollo.utils.temp_folder import goes_with_it
from alphaapollo.utils.watchdog import name_run, start_reaper
from alphaapollo.weight_sync.publish import WeightPublisher
from alphaapollo.weight_sync.verification import GAP_BFLOAT16, GAP_FLOAT32

USUAL = gc.get_threshold()  # of the search for cycles


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check and has started nothing."""

    config: Config
    plan: Plan
    inputs: Inputs
    start: Start

    @property
    def progress(self) -> Progress:
        """Of the checkpoint, or of a new run."""
        return find_progress(self.start, self.config.algorithm.kl_ctrl)

    @property
    def change_rule(self) -> ChangeRule:
        return change_rule_of(self.config)

    def going_on(self, config: Config, start: Start) -> Prepared:
        """The same run from elsewhere."""
        return replace(self, config=config, start=start)

    @property
    def complete(self) -> bool:
        """No iteration remains, and the model is written."""
        return self.inputs.goal.reached(self.progress) and (
            self.start.is_exported() or not self.config.trainer.export_hf
        )


def prepare(config: Config, origin: Origin = NO_ORIGIN) -> Prepared:
    """Check everything that can be checked without a worker, and print the plan."""
    machine = find_machine(config.trainer)
    config, kept_threads = settle_threads(config, machine)
    plan = make_plan(config, machine, origin)
    plan = replace(plan, notices=[*plan.notices, *kept_threads])
    check_trackers(config.trainer.logger)
    start = find_start(config, change_rule_of(config))
    inputs = read_inputs(config)
    check_steps("trainer.profile_steps", config.trainer.profile_steps or [], inputs.total_steps)
    check_steps("trainer.record_steps", config.trainer.record_steps or [], inputs.total_steps)
    plan = with_memory(plan, config, machine)
    print_plan(plan, inputs, start, config, Terminal(highlight=False, soft_wrap=True))
    if plan.memory and plan.memory.problem:
        raise ValueError(plan.memory.problem)
    return Prepared(config, plan, inputs, start)


async def run(prepared: Prepared, progress: Progress) -> None:
    """Train from where the run stands (`progress`, which moves with it) to the last iteration; every process that was
    started ends with it."""
    config, plan, inputs, start = prepared.config, prepared.plan, prepared.inputs, prepared.start
    if problem := missing_cluster(config.trainer):
        raise ValueError(problem)
    moved = start.claim(config)
    checkpoints = CheckpointFolder(plan.folder / "checkpoints", config.trainer.max_ckpt_to_keep)
    console = Console()
    console.start(inputs.total_steps, progress.step)
    if moved:
        console.notice(f"the earlier run of this name lies in {moved}")
    tracker = make_tracker(config.model_dump(mode="json"), plan.folder, progress.step, console.notice)
    rollout_log = RolloutLog(plan.folder / "rollouts")
    timer = Timer()
    crew: Crew | None = None
    try:
        with timer("start"):
            console.phase("start", 0, 1)
            crew = await launch(prepared)
        seldom_collect()
        prefer_huge_pages()
        ready = make_run(prepared, crew, progress, checkpoints, tracker, rollout_log, console)
        async with watched(crew, config.trainer, plan.placement.device, console.notice) as lost:
            await begin(ready, start.checkpoint, timer)
            async with ready.saving.settled():
                loop = train_async(ready) if config.trainer.async_mode else train(ready)
                await (ready.saving.guarded(loop, lost) if config.trainer.save_on_signal else loop)
            await end(ready)
        console.where_time_went()
    finally:
        collect_as_usual()
        SPANS.take()  # of an iteration that was to be profiled, and did not end
        if crew:
            await crew.close()
        close_all(rollout_log.close, tracker.close, console.close)


async def end(run: Run) -> None:
    """The model, where it is asked for, or how to get it."""
    trainer, console, folder = run.config.trainer, run.console, run.plan.folder
    if run.progress.step < run.goal.steps:
        console.notice(f"trainer.total_epochs={trainer.total_epochs} ended after {run.progress.step} iterations")
    if trainer.export_hf:
        await run.crew.engines.sleep()
        with SPANS("export"):
            await run.crew.policy.export(str(folder / "model"), trainer.export_lora)
        console.notice(f"the model lies in {folder / 'model'}")
    elif trainer.save_freq > 0:
        console.notice(f"to write the model: python -m alphaapollo.trainer.main_export checkpoint={folder}")


def seldom_collect() -> None:
    """Python's search for cycles goes through every list of token ids again and again, and there are hardly any cycles:
    what is there by now is left out, and the rest is looked at a few times an iteration."""
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def prefer_huge_pages() -> None:
    """For matrices [B, L], most of whose time would else go into the page faults of fresh memory. torch looks at this
    once, at its first large one; numpy does so anyway. After the workers' start, whose memory is planned without."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def collect_as_usual() -> None:
    """What was left out is looked at again: libraries whose objects outlive the interpreter complain after our last
    line."""
    gc.unfreeze()
    gc.set_threshold(*USUAL)


def find_progress(start: Start, kl: KLController) -> Progress:
    """The checkpoint's, or that of a new run. A fixed coefficient is the configuration's."""
    if start.checkpoint is None:
        return Progress(kl_coef=kl.kl_coef)
    progress = Progress.read(start.checkpoint)
    return replace(progress, kl_coef=kl.kl_coef) if kl.type == "fixed" else progress


def make_run(
    prepared: Prepared,
    crew: Crew,
    progress: Progress,
    checkpoints: CheckpointFolder,
    tracker: Tracker,
    rollout_log: RolloutLog,
    console: Console,
) -> Run:
    """All that the loop needs, around workers that have started."""
    config, plan, inputs = prepared.config, prepared.plan, prepared.inputs
    dtypes = {plan.model.dtype, plan.rollout.dtype}
    tolerance = GAP_FLOAT32 if dtypes == {"float32"} else GAP_BFLOAT16
    return Run(
        config=config,
        plan=plan,
        crew=crew,
        weights=WeightPublisher(
            crew.policy,
            crew.engines,
            inputs.probe,
            tolerance,
            in_flight=config.trainer.async_mode is not None,
            keep_cache=config.trainer.keep_kv_cache,
        ),
        prompts=inputs.prompts,
        val_prompts=inputs.val_prompts,
        goal=inputs.goal,
        stream=PromptStream(len(inputs.prompts), config.data.seed, config.data.shuffle),
        estimator=plan.estimator,
        kl_controller=make_kl_controller(config.algorithm.kl_ctrl),
        progress=progress,
        saving=Saving(checkpoints, crew, console.notice),
        tracker=tracker,
        rollout_log=rollout_log,
        console=console,
        profiler=StepProfiler(config.trainer.profile_steps or [], crew, plan.folder, console),
        trained_reward=make_trained_reward(prepared, crew),
    )


def make_trained_reward(prepared: Prepared, crew: Crew) -> TrainedReward | None:
    """The reward model at work, where there is one."""
    config, plan, inputs = prepared.config, prepared.plan, prepared.inputs
    if crew.reward_model is None:
        return None
    assert inputs.reader is not None
    return TrainedReward(
        group=crew.reward_model,
        engines=crew.engines,
        reader=inputs.reader,
        num_ranks=plan.placement.data_parallel,
        max_tokens=config.reward_model.forward_max_token_len_per_gpu * plan.placement.sequence_parallel,
        padded=plan.padded,
        weight=config.reward_model.weight,
        required=config.reward.required,
        alone=not inputs.has_function,
    )


async def begin(run: Run, checkpoint: Path | None, timer: Timer) -> None:
    """Bring everybody to the state of the checkpoint (or of the model's folder), and prove it by a first publish. The
    GPUs change hands as in every iteration (loop.py)."""
    for doubt in await run.crew.policy.doubts():
        run.console.notice(doubt)
    run.shares_prompts = run.plan.shares_prompts and await can_share_prompts(run)
    run.begin_reference()
    await run.crew.engines.sleep()
    if checkpoint:
        with SPANS("load"):
            if run.crew.critic:
                await run.crew.critic.load(str(checkpoint / "critic"))
                await run.crew.critic.rest()
            await run.crew.policy.load(str(checkpoint / "policy"))
        run.console.notice(f"resumed from {checkpoint}")
    run.console.phase("publish", 0, 1)
    with SPANS("publish"):
        metrics = await run.weights.publish(run.progress.step)
    if checkpoint is None:
        if run.config.trainer.val_before_train:
            with timer("validate"):
                validation = await validate_now(run, 0)
            metrics |= validation.metrics
            run.progress.best_accuracy = validation.accuracy
        metrics |= timer.metrics()
        run.tracker.log(0, metrics)
        run.console.step(0, metrics)


async def can_share_prompts(run: Run) -> bool:
    """What the models' self-checks at the start say. ValueError: they cannot, and it is asked for."""
    key, roles = f"{ACTOR}.use_prefix_grouper", [run.crew.policy, run.crew.critic]
    problems = [problem for role in roles if role and (problem := await role.sharing_problem())]
    if problems and run.config.actor_rollout_ref.actor.use_prefix_grouper is True:
        raise ValueError(f"{key}=true: {problems[0]}. Set it to auto or false.")
    if problems:
        run.console.notice(f"each sample computes its prompt anew ({key}): {problems[0]}.")
    return not problems


async def launch(prepared: Prepared) -> Crew:
    """Start the workers where trainer.controller says."""
    config, plan = prepared.config, prepared.plan
    run_id = name_run()
    inputs = prepared.inputs
    roles = make_roles(config, plan, run_id, inputs.total_steps, inputs.has_function)
    start_reaper(run_id, roles.cleanup)
    goes_with_it(roles.cleanup)
    if config.trainer.controller == "local":
        return await launch_local(plan.placement, roles)
    from alphaapollo.controller.ray_crew import launch_ray, start_local_cluster

    paths: dict[str, str] | None = None
    if not os.environ.get("RAY_ADDRESS"):  # else prepare() has connected
        start_local_cluster()
    else:
        paths = local_paths(config) | {RUN_FOLDER: str(plan.folder / "config.yaml")}
    return await launch_ray(plan.placement, roles, config.trainer.start_timeout, paths)
