"""Generate and score samples without training (main_generation).

prepare: read, check, print the plan  ->  run: unfinished prompts -> engines -> results.jsonl, one group at a time
->  metrics of all results on the console, in summary.json and summary.csv
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from alphaapollo.config.check import check
from alphaapollo.config.resolve import engine_threads, resolve_controller, resolve_device, resolve_rollout
from alphaapollo.config.schema import GenerationConfig, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.health.stall_monitor import StallMonitor, StallSettings
from alphaapollo.controller.launcher import launch_workers
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs
from alphaapollo.data.rendering import unused_template_arguments
from alphaapollo.engines.vllm.user_arguments import check_engine_kwargs
from alphaapollo.evaluation.metrics import SampleResult, sample_result
from alphaapollo.evaluation.report import report
from alphaapollo.evaluation.results import FinishedResults, ResultsFile, read_finished
from alphaapollo.launch.builders import build_engine
from alphaapollo.launch.input_checks import (
    check_engine_split,
    check_lengths,
    check_rewards,
    environment_notices,
    find_environment,
    find_machine,
    local_paths,
    make_renderer,
    read_prompts,
)
from alphaapollo.launch.resume import StartPoint, own_changes
from alphaapollo.launch.try_environment import try_resets
from alphaapollo.models.folder_check import check_weights
from alphaapollo.observability.counter import ProgressCounter
from alphaapollo.observability.spans import SPANS
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import GroupRequest, Prompt, Sampling
from alphaapollo.utils.watchdog import new_run_id


@dataclass(frozen=True)
class GenerationPlan:
    """A generation that has passed all checks."""

    config: GenerationConfig
    device: Device
    rollout: Rollout  # with resolved dtype and number of engines
    prompts: list[Prompt]
    finished: FinishedResults
    start: StartPoint
    folder: Path

    @property
    def requests(self) -> list[GroupRequest]:
        """Requests of unfinished prompts, with the same random draws as a validation with this seed."""
        config, done = self.config, self.finished.prompts
        sampling = Sampling(
            config.data.max_response_length,
            config.rollout.temperature,
            config.rollout.top_p,
            config.rollout.top_k,
            config.trainer.seed,
        )
        return [
            GroupRequest(prompt, config.data.n_samples, sampling, draw=0, validate=True)
            for prompt in self.prompts
            if prompt.id not in done
        ]


def prepare(config: GenerationConfig, terminal: Terminal) -> GenerationPlan:
    """Check everything that needs no engine, read finished results, and print the plan. Raises ValueError."""
    machine = find_machine(config.trainer)
    notices = check(config, machine.num_gpus, machine.num_cores)
    environment = find_environment(config.env)
    notices += environment_notices(config, environment)
    check_engine_kwargs(config.rollout, "rollout")
    check_weights(config.model, "model.path")
    check_lengths(config.model, config.rollout, config.data)
    check_engine_split(config.model, config.rollout, "rollout")
    renderer = make_renderer(config.env, config.model, config.data.apply_chat_template_kwargs)
    prompts, more = read_prompts(config.data.path, "data.path", renderer, config.data)
    more += unused_template_arguments(config.data.apply_chat_template_kwargs, renderer.tokenizer)
    more += check_rewards(prompts, config.reward, config.custom_reward_function, environment.graded)[0]
    asyncio.run(try_resets(config.env, prompts[:1]))
    device = resolve_device(config.trainer.device, machine.num_gpus)
    finished, start = _find_finished(config, prompts)
    rollout = resolve_rollout(config.rollout, config.model, device, config.trainer.num_gpus)
    threads = engine_threads(rollout, machine.num_cores, config.trainer.nnodes, own_cores=False)
    generation = GenerationPlan(
        config=config,
        device=device,
        rollout=rollout.model_copy(update={"cpu_threads": threads}),
        prompts=prompts,
        finished=finished,
        start=start,
        folder=config.trainer.folder,
    )
    _print_plan(generation, [*notices, *more, *start.lines()], terminal)
    return generation


async def run(generation: GenerationPlan, terminal: Terminal) -> None:
    """Generate unfinished prompts, then report all results. Raises ValueError if all samples failed."""
    config, folder = generation.config, generation.folder
    if moved := generation.start.claim(config):
        terminal.print(f"note: the previous run of this name was moved to {moved}", markup=False, soft_wrap=True)
    results = [*generation.finished.results]
    if generation.requests:
        workers = await launch(generation)
        try:
            async with make_stall_monitor(generation, workers, terminal):
                results += await _play(generation, workers, terminal)
        finally:
            await workers.close()
    report(results, generation.prompts, folder, terminal)


def make_stall_monitor(generation: GenerationPlan, workers: WorkerGroups, terminal: Terminal) -> StallMonitor:
    trainer, folder = generation.config.trainer, generation.folder
    return StallMonitor(
        workers.ranks,
        StallSettings(trainer.stall_notice, trainer.stall_timeout, generation.device, folder),
        lambda text: terminal.print(f"note: {text}", markup=False, soft_wrap=True),
        lambda: f"stopped; run the same command to resume where {folder} ends",
    )


async def launch(generation: GenerationPlan) -> WorkerGroups:
    """Start the engines, in this process or over Ray (trainer.controller)."""
    config = generation.config
    run_id = new_run_id()
    shared_memory = f"/dev/shm/alphaapollo-{run_id}"
    # No trainer shares the GPU, so the engine never sleeps.
    rollout, num_engines = generation.rollout, generation.rollout.num_engines
    assert num_engines is not None
    rollout = rollout.model_copy(update={"colocate": False, "free_cache_engine": False, "router_replay": False})
    specs = WorkerSpecs(
        placement=Placement(
            device=generation.device,
            num_engines=num_engines,
            tensor_parallel=config.rollout.tensor_model_parallel_size,
        ),
        run_id=run_id,
        engine=partial(
            build_engine,
            config.model,
            rollout,
            config.env,
            config.data,
            config.reward,
            config.custom_reward_function,
            generation.device,
            str(generation.folder.resolve()),
            shared_memory,
            "shared_memory",  # unused: no weights are published
        ),
        samples_in_flight=2 * config.rollout.max_num_seqs,
        cleanup=[shared_memory],
    )
    timeout = config.trainer.start_timeout
    return await launch_workers(specs, resolve_controller(config.trainer), timeout, local_paths(config))


async def _play(generation: GenerationPlan, workers: WorkerGroups, terminal: Terminal) -> list[SampleResult]:
    """Write each group when it ends, so that a kill loses only groups in progress."""
    results: list[SampleResult] = []
    stats = _RunningStats()
    path, done = generation.folder / "results.jsonl", len(generation.finished.prompts)
    with (
        SPANS("generate"),
        ResultsFile(path, generation.finished) as file,
        ProgressCounter("prompts", len(generation.prompts), done, terminal) as counter,
    ):
        async for _, group in workers.engines.generate(generation.requests):
            file.append(group)
            own = [sample_result(group.prompt, trajectory) for trajectory in group.trajectories]
            results += own
            counter.advance(stats.update(own))
    return results


class _RunningStats:
    """Accuracy and speed shown during generation."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._accuracy = 0.0
        self._scored = self._tokens = 0

    def update(self, results: Sequence[SampleResult]) -> str:
        """Add results and format the statistics of this process: `accuracy 0.532   2,940 tokens/s`."""
        scored = [result.accuracy for result in results if not result.outcome.failed]
        self._accuracy += sum(scored)
        self._scored += len(scored)
        self._tokens += sum(result.num_tokens or 0 for result in results)
        accuracy = f"accuracy {self._accuracy / self._scored:.3f}   " if self._scored else ""
        return f"{accuracy}{self._tokens / (time.perf_counter() - self._started):,.0f} tokens/s"


def _find_finished(config: GenerationConfig, prompts: Sequence[Prompt]) -> tuple[FinishedResults, StartPoint]:
    """Find finished results. Raises ValueError if they belong to another configuration or to other data."""
    folder = config.trainer.folder
    if config.trainer.resume_mode == "disable":
        return FinishedResults(), StartPoint(folder, in_the_way=folder.exists())
    if not (folder / "results.jsonl").exists():
        return FinishedResults(), StartPoint(folder)
    changes = own_changes(config)
    by_id = {prompt.id: prompt for prompt in prompts}
    finished = read_finished(folder / "results.jsonl", by_id, config.data.n_samples)
    return finished, StartPoint(folder, changes=tuple(changes))


def _print_plan(generation: GenerationPlan, notices: Sequence[str], terminal: Terminal) -> None:
    config, finished = generation.config, generation.finished
    total = len(generation.prompts)
    parallel = config.rollout.tensor_model_parallel_size
    dropped = f", {finished.num_dropped} lines of unfinished prompts are removed" if finished.num_dropped else ""
    tensor_parallel = f", tensor parallel {parallel}" if parallel > 1 else ""
    threads = f" of {generation.rollout.cpu_threads} thread(s)" if generation.device == "cpu" else ""
    lines = [
        f"{generation.folder}",
        f"  prompts    {total} x {config.data.n_samples} samples = {total * config.data.n_samples}",
        f"  finished   {len(finished.prompts)} prompts{dropped}",
        f"  model      {config.model.path}",
        f"  sampling   temperature {config.rollout.temperature:g}, top_p {config.rollout.top_p:g}, "
        f"top_k {config.rollout.top_k}, seed {config.trainer.seed}",
        f"  lengths    prompt {config.data.max_prompt_length} + response {config.data.max_response_length} tokens",
        f"  engines    {generation.rollout.num_engines} x {generation.device}{threads}{tensor_parallel}",
        *(f"note: {notice}" for notice in notices),
    ]
    terminal.print("\n".join(lines), markup=False, soft_wrap=True)
