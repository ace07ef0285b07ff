"""Generate and grade responses without training (main_generation).

prepare_run: read and check the inputs, print the plan
run: generate responses, append them to results.jsonl, and write the metrics to summary.json and summary.csv
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.resolve import get_resolved, resolve_controller, resolve_generation
from alphaapollo.config.schema import GenerationConfig, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.launcher import launch_workers
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.stall_monitor import StallMonitor
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs
from alphaapollo.data.stream import choose_rows
from alphaapollo.evaluation.metrics import SampleResult, convert_to_sample_result, read_sample_result, write_report
from alphaapollo.launch import input_checks
from alphaapollo.launch.model_requirements import ModelUse, check_models
from alphaapollo.models.load import list_template_notices
from alphaapollo.observability.console import Console
from alphaapollo.planning.first_start import fix_template_date
from alphaapollo.planning.plan_table import print_plan_table
from alphaapollo.planning.trials import try_environment
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.runs.resume import StartPoint, find_inference_start
from alphaapollo.runs.rollout_log import format_trajectory_lines, replace_images, save_image
from alphaapollo.runs.run_plan import RunPlan
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.heartbeat import HEARTBEAT

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class GenerationPlan:
    """Inputs of a main_generation run, which have passed all checks."""

    config: GenerationConfig
    device: Device
    rollout: Rollout  # settings with resolved dtype and number of engines
    prompts: list[Prompt]
    finished: FinishedResults  # results that an interrupted run wrote
    start: StartPoint  # start from scratch, or resume
    notices: list[str]

    @property
    def requests(self) -> list[GroupRequest]:
        """Sampling requests of the prompts without results. The same seed gives the same samples as a validation."""
        done, sampling = self.finished.problem_ids, make_sampling(self.config)
        return [
            GroupRequest(prompt, self.config.data.n_samples, sampling, stream_position=0, validate=True)
            for prompt in self.prompts
            if prompt.id not in done
        ]


def make_sampling(config: GenerationConfig) -> Sampling:
    """Create the sampling parameters of main_generation from its config."""
    rollout, max_tokens = config.rollout, config.data.max_response_length
    return Sampling(
        max_tokens,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        config.trainer.seed,
        stop=rollout.stop_strings,
        includes_stop=rollout.include_stop_str_in_output,
    )


def prepare_run(config: GenerationConfig, console: Console) -> GenerationPlan:
    """Check the inputs without starting an engine, read earlier results, and print the plan."""
    machine = input_checks.detect_node_resources(config)
    config = fix_template_date(config, config.model)
    notices = check_config_and_get_notices(config, machine.num_gpus, machine.num_cores)
    environment = input_checks.find_environment_spec(config.env)
    notices += input_checks.collect_environment_notices(config, environment)
    check_models([ModelUse("model.path", config.model, engine=config.rollout, lengths=config.data)])
    renderer = input_checks.make_renderer(config.env, config.model, config.data.apply_chat_template_kwargs)
    choose = partial(choose_rows, max_rows=config.data.max_samples, seed=0, shuffle=False)
    prompts, more, findings = input_checks.read_prompts(config.data.path, "data.path", renderer, config.data, choose)
    more += [finding.describe() for finding in findings]
    more += list_template_notices(config.model, renderer, config.data.apply_chat_template_kwargs)
    is_graded = environment.is_graded(config.env)
    more += input_checks.check_rewards(prompts, config.reward, config.custom_reward_function, is_graded)[0]
    more += try_environment(config.env, prompts[:1])
    device, rollout = resolve_generation(config, machine.num_gpus, machine.num_cores)
    start, finished = find_inference_start(config, RESULTS), FinishedResults()
    if not start.replaces_previous_run:
        by_id = {prompt.id: prompt for prompt in prompts}
        finished = read_finished_results(config.trainer.folder / RESULTS, by_id, config.data.n_samples)
    notices += [*more, *start.describe()]
    plan = GenerationPlan(config, device, rollout, prompts, finished, start, notices)
    print_plan_table(config.trainer.folder, make_run_plan(plan), console)
    return plan


async def run(plan: GenerationPlan, console: Console) -> None:
    """Generate responses to the prompts without results, then report all results. Raises ValueError if all failed."""
    config, trainer = plan.config, plan.config.trainer
    folder = trainer.folder
    if moved := plan.start.prepare_folder(config, make_run_plan(plan)):
        console.notify(f"the previous run of this name was moved to {moved}")
    results = [*plan.finished.results]
    if plan.requests:
        with HEARTBEAT.record_call("start"):
            workers = await launch_engines(config, plan.rollout, plan.device, folder)
        hint = f"stopped; run the same command to resume from {folder}"
        try:
            async with StallMonitor(workers.ranks, trainer, plan.device, console.notify, lambda: hint):
                results += await _generate_groups(plan, workers, console)
        finally:
            with HEARTBEAT.record_call("stop"):
                await workers.close()
    console.end_live_view()
    write_report(results, plan.prompts, folder, console.terminal)


async def launch_engines(config: GenerationConfig, rollout: Rollout, device: Device, folder: Path) -> WorkerGroups:
    """Start only rollout workers, in this process or with Ray. `rollout`: with resolved settings."""
    run_id = new_run_id()
    shared_memory = f"/dev/shm/alphaapollo-{run_id}"
    parallel = rollout.tensor_model_parallel_size
    assert rollout.num_engines is not None
    engines = RolloutWorkerConfig(
        model=config.model,
        rollout=rollout,
        env=config.env,
        data=config.data,
        reward=config.reward,
        custom_reward=config.custom_reward_function,
        device=device,
        run_dir=str(folder.resolve()),
        shared_memory=shared_memory,
    )
    specs = WorkerSpecs(
        placement=Placement(device=device, num_engines=rollout.num_engines, tensor_parallel=parallel),
        run_id=run_id,
        engine_builder=partial(RolloutWorker, engines),
        samples_in_flight=2 * get_resolved(rollout.max_num_seqs),
        cleanup_folders=[shared_memory],
    )
    paths = input_checks.find_local_paths(config)
    return await launch_workers(specs, resolve_controller(config.trainer), config.trainer.start_timeout, paths)


async def _generate_groups(plan: GenerationPlan, workers: WorkerGroups, console: Console) -> list[SampleResult]:
    """Generate and grade responses. When all samples of a prompt are graded, they are written to results.jsonl."""
    results: list[SampleResult] = []
    started, total_accuracy, num_scored, num_tokens = time.perf_counter(), 0.0, 0, 0  # totals of this process
    path, done = plan.config.trainer.folder / RESULTS, len(plan.finished.problem_ids)
    num_before = done
    console.show_phase("generate", done, len(plan.prompts))
    num_slots = workers.engines.ranks.size * get_resolved(plan.rollout.max_num_seqs) // plan.config.data.n_samples
    with HEARTBEAT.record_call("generate"), open_results_writer(path, plan.finished) as write:
        async for _, group in workers.engines.generate(plan.requests):
            write(group)
            new = [convert_to_sample_result(group.prompt, trajectory) for trajectory in group.trajectories]
            results += new
            scored = [result.accuracy for result in new if not result.outcome.failed]
            total_accuracy += sum(scored)
            num_scored += len(scored)
            num_tokens += sum(result.num_tokens or 0 for result in new)
            is_known = num_scored and not math.isnan(total_accuracy)
            accuracy = f"accuracy {total_accuracy / num_scored:.3f}   " if is_known else ""
            done += 1
            in_flight = min(num_slots, len(plan.prompts) - done)
            all_tokens = num_tokens * (1 + in_flight / 2 / (done - num_before))  # with those of unfinished prompts
            text = f"{accuracy}{all_tokens / (time.perf_counter() - started):,.0f} tokens/s"
            console.show_phase("generate", done, len(plan.prompts), text, in_flight)
            console.show_samples([group])
    return results


def make_run_plan(plan: GenerationPlan) -> RunPlan:
    """Describe model, prompts, sampling and engines of a run, and all notices."""
    config, finished = plan.config, plan.finished
    total = len(plan.prompts)
    parallel = config.rollout.tensor_model_parallel_size
    dropped = f", {finished.num_dropped} lines of unfinished prompts are removed" if finished.num_dropped else ""
    tensor_parallel = f", tensor parallel {parallel}" if parallel > 1 else ""
    threads = f" of {plan.rollout.cpu_threads} thread(s)" if plan.device == "cpu" else ""
    settings = {
        "prompts": f"{total} x {config.data.n_samples} samples = {total * config.data.n_samples}",
        "finished": f"{len(finished.problem_ids)} prompts{dropped}",
        "model": config.model.path,
        "sampling": f"temperature {config.rollout.temperature:g}, top_p {config.rollout.top_p:g}, "
        f"top_k {config.rollout.top_k}, seed {config.trainer.seed}"
        + (f", stop {config.rollout.stop}" if config.rollout.stop_strings else ""),
        "lengths": f"prompt {config.data.max_prompt_length} + response {config.data.max_response_length} tokens",
        "engines": f"{plan.rollout.num_engines} x {plan.device}{threads}{tensor_parallel}",
    }
    return RunPlan(settings, notices=plan.notices)


@dataclass(frozen=True)
class FinishedResults:
    """Results in results.jsonl that an earlier process wrote for prompts whose samples are all graded."""

    results: list[SampleResult] = field(default_factory=list)
    line_numbers: frozenset[int] = frozenset()  # lines of the file that contain `results`
    num_dropped: int = 0  # number of other lines in the file

    @property
    def problem_ids(self) -> set[int]:
        """Ids of the prompts whose samples are all finished."""
        return {result.problem_id for result in self.results}


def read_finished_results(path: Path, prompts: Mapping[int, Prompt], num_samples: int) -> FinishedResults:
    """Read the results of prompts that have all samples. Raises ValueError for results of other data."""
    if not path.exists():
        return FinishedResults()
    groups: dict[int, dict[int, tuple[int, SampleResult]]] = defaultdict(dict)
    num_lines = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            num_lines += 1
            result = _parse_result_line(line, prompts, path)
            if result is not None:
                groups[result.problem_id].setdefault(result.sample_index, (number, result))
    complete = [group for group in groups.values() if set(group) == set(range(num_samples))]
    return FinishedResults(
        results=[result for group in complete for _, result in group.values()],
        line_numbers=frozenset(number for group in complete for number, _ in group.values()),
        num_dropped=num_lines - num_samples * len(complete),
    )


def _parse_result_line(line: bytes, prompts: Mapping[int, Prompt], path: Path) -> SampleResult | None:
    """Parse a line of results.jsonl; None if it is incomplete. Raises ValueError if its prompt is not in `prompts`."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        result, truth = read_sample_result(record), record["ground_truth"]
        content = record["prompt"] if record["row_prompt"] is None else record["row_prompt"]
    except (ValueError, KeyError, TypeError):  # the process or machine died while writing
        return None
    number, prompt = result.problem_id, prompts.get(result.problem_id)
    same = prompt is not None and truth in (prompt.ground_truth_in_files, prompt.ground_truth_text)
    if prompt is None or not same or replace_images(prompt.content) != content:
        raise ValueError(
            f"prompt {number} in {path} differs from row {number} of data.path, so these results belong to "
            "other data. Set another trainer.experiment_name, or trainer.resume_mode=disable to start from scratch."
        )
    return result


@contextmanager
def open_results_writer(path: Path, finished: FinishedResults) -> Iterator[Callable[[TrajectoryGroup], None]]:
    """Open results.jsonl without the lines of unfinished prompts. Yields a function that appends a prompt's samples."""
    with explain_write_errors("the results", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if finished.num_dropped:
            with path.open("rb") as old:
                replace_file(path, (line for number, line in enumerate(old) if number in finished.line_numbers))
        file = path.open("a", encoding="utf-8")

    def append(group: TrajectoryGroup) -> None:
        with explain_write_errors("the results", path):
            file.writelines(format_trajectory_lines(0, [group], partial(save_image, path.parent)))
            file.flush()

    with file:
        yield append
