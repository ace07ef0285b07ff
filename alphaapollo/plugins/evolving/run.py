"""Prepare and run a self-evolution.

prepare_run: read the data, check the configuration, print the plan; starts no process.
run: start models, tools and graders, run the loop, write the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import ClassVar

from alphaapollo.config.load import UserSettings
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import detect_machine
from alphaapollo.controller.stall_monitor import StallMonitor
from alphaapollo.data.files import HELD_OUT, name_splits
from alphaapollo.data.images import collect_images
from alphaapollo.data.prompts import apply_length_limit, load_prompts
from alphaapollo.environments.base import Services, get_environment_spec
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.launch.prepare import Preparation
from alphaapollo.models.load import list_template_notices
from alphaapollo.observability.console import Console
from alphaapollo.planning.template import fix_template_date
from alphaapollo.planning.trials import try_environment
from alphaapollo.plugins.evolving.calls import STOP, Budget, RoleCaller, make_roles
from alphaapollo.plugins.evolving.evolution import Evolution, compute_earlier_digest, open_agent_proposers
from alphaapollo.plugins.evolving.model_clients import (
    EngineClient,
    ModelClient,
    make_clients,
    make_served_models,
    report_engine_progress,
)
from alphaapollo.plugins.evolving.pool import FILE, Pool
from alphaapollo.plugins.evolving.report import compute_round_metrics, write_results
from alphaapollo.plugins.evolving.settings import EvolvingConfig
from alphaapollo.processes.watchdog import new_run_id, start_reaper
from alphaapollo.rewards.base import make_failed_score
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.registry import is_gradable
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.resume import find_inference_start
from alphaapollo.runs.rollout_log import compute_prompt_digest
from alphaapollo.runs.run_plan import RunPlan
from alphaapollo.session.start import begin_run_folder
from alphaapollo.types import Prompt, Score
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.user_module import load_user_module


class EvolutionPreparation(Preparation):
    """Checked inputs of a self-evolution run that has not started any process."""

    LEFT_OUT: ClassVar = {
        "choose_cpu_threads": "a call that is in the pool is not repeated",
        "check_trackers": "its metrics are those of the pool",
        "make_renderer": "each model has its own, in its client",
        "check_teachers": "it has no teacher",
        "plan_memory": "engines take what is free when they start",
    }
    config: EvolvingConfig
    prompts: list[Prompt]
    clients: Mapping[str, ModelClient]  # by name of the model; engines are not started
    device: Device  # of the engines

    @property
    def solutions_per_problem(self) -> int:
        return self.config.evolving.rounds * len(self.config.branches) * self.config.data.n_samples

    @property
    def engines(self) -> dict[str, EngineClient]:
        """Clients of the models that this run serves."""
        return {name: client for name, client in self.clients.items() if isinstance(client, EngineClient)}

    @property
    def uses_reward(self) -> bool:
        """Whether the environment scores with the reward function."""
        return self.environment.is_graded(self.config.env)

    def has_ground_truth(self, prompt: Prompt) -> bool:
        """Whether solutions of a problem can be graded."""
        return bool(self.config.custom_reward_function.path) or is_gradable(prompt)

    def list_graded_prompts(self) -> list[Prompt]:
        return [prompt for prompt in self.prompts if self.has_ground_truth(prompt)]

    def find_machine(self) -> None:
        self.machine = detect_machine()  # engines run here, even if RAY_ADDRESS names a cluster
        if not make_served_models(self.config):
            self.machine = replace(self.machine, num_gpus=0)  # servers compute elsewhere

    def fix_template_date(self) -> None:
        for model in make_served_models(self.config).values():
            self.config = fix_template_date(self.config, model)

    def check_config(self) -> None:
        super().check_config()
        if self.config.evolving.custom_module:
            load_user_module(self.config.evolving.custom_module, "evolving.custom_module")
        make_roles(self.config.all_roles)

    def resolve_workers(self) -> None:
        self.device = resolve_device(self.config.trainer.device, self.machine.num_gpus)

    def find_start(self) -> None:
        self.start = find_inference_start(self.config, FILE)

    def check_models(self) -> None:
        """Check the models, and make their clients."""
        self.clients = make_clients(self.config)

    def read_data(self) -> None:
        """Read the problems, and compare them with those of an interrupted run."""
        config, data = self.config, self.config.data
        files, truths = name_splits(data.path, HELD_OUT, self.notices), data.ground_truth_key
        prompts = load_prompts(files, data.prompt_key, system_prompt=data.system_prompt, ground_truth_key=truths)
        if any(collect_images(prompt.content) for prompt in prompts):
            raise ValueError(
                f"data.path={data.path} has prompts with images, but roles exchange texts only. Remove these rows."
            )
        for client in self.engines.values():
            total, limit = len(prompts), data.max_prompt_length
            prompts, num_long = apply_length_limit(prompts, client.renderer, limit, data.truncation)
            self.notices += [f"{num_long} of {total} problems exceed data.max_prompt_length."] * bool(num_long)
        self.prompts = prompts
        if not self.start.replaces_previous_run:
            rows = {prompt.id: (compute_prompt_digest(prompt), compute_earlier_digest(prompt)) for prompt in prompts}
            for candidate in Pool(config.trainer.folder).candidates.values():
                if candidate.row not in rows.get(problem := candidate.position.problem, ()):
                    raise ValueError(
                        f"{config.trainer.folder} has results for other data: row {problem} of data.path has changed "
                        f"since candidate {candidate.key}. Set another trainer.experiment_name, or "
                        "trainer.resume_mode=disable."
                    )

    def check_template(self) -> None:
        arguments = self.config.data.apply_chat_template_kwargs
        for name, model in make_served_models(self.config).items():
            self.notices += list_template_notices(model, self.engines[name].renderer, arguments)

    def try_rewards(self) -> None:
        num_gradable, total = len(self.list_graded_prompts()), len(self.prompts)
        if self.uses_reward and num_gradable < total:
            self.notices.append(
                f"{total - num_gradable} of {total} problems have no ground truth. They are solved, but excluded from "
                "all accuracies."
            )
        if num_gradable:
            super().try_rewards()

    def try_environment(self) -> None:
        self.notices += try_environment(self.config.env, self.prompts[:1])

    def describe(self) -> RunPlan:
        """Describe problems, models, roles and budget of a run, and all notices."""
        config, evolving = self.config, self.config.evolving
        limits = config.budget.model_dump(exclude_none=True)
        roles = [
            f"{slot} {role.plugin}{f' ({role.model})' if role.model else ''}"
            for slot, role in config.all_roles.items()
            if role.plugin
        ]
        models = [f"{name}: {model.path or model.base_url or model.name}" for name, model in config.models.items()]
        settings = {
            "problems": f"{len(self.prompts)} x {self.solutions_per_problem} solutions: "
            f"{evolving.rounds} round(s) x {len(config.branches)} branch(es) x {config.data.n_samples}",
            "verifiers": f"{evolving.votes} per solution",
            "models": ", ".join(models),
            "branches": ", ".join(config.branches),
            "roles": ", ".join(roles),
            "memory": f"{evolving.memory_size} past solutions ({evolving.memory_type})",
            "budget": f"{', '.join(f'{name} {value:g}' for name, value in limits.items()) or 'unlimited'}; "
            f"to stop: touch {config.trainer.folder / STOP}",
        }
        return RunPlan(settings, notices=self.all_notices)


def prepare_run(config: EvolvingConfig, user_settings: UserSettings, console: Console) -> EvolutionPreparation:
    """Check everything that can be checked without starting a model, and print the plan. Raises ValueError if the
    configuration, the data or the run folder is invalid."""
    return EvolutionPreparation(config, console, user_settings).prepare()


async def run(prepared: EvolutionPreparation) -> None:
    """Run or resume the evolution until its end or the end of the budget, and write the results."""
    config, console, folder = prepared.config, prepared.console, prepared.config.trainer.folder
    note = console.notify
    begin_run_folder(prepared)
    pool, problems = Pool(folder), [prompt.id for prompt in prepared.prompts]
    if pool.incomplete_bytes:
        note(f"{pool.path} ends with an incomplete last line of {pool.incomplete_bytes} bytes, which is removed")
    if pool.calls:
        counts = f"{len(pool.calls)} calls, {len(pool.candidates)} candidates, {len(pool.judgements)} judgements"
        note(f"resuming from {counts}")
    (folder / STOP).unlink(missing_ok=True)  # left by an earlier process
    stall_monitor = StallMonitor([], config.trainer, prepared.device, note, lambda: "run the same command to resume")
    solved, total = count(1), len(problems) * prepared.solutions_per_problem

    def log_round(round_number: int) -> None:
        metrics = compute_round_metrics(pool, problems, round_number)
        if metrics["cost/calls"]:
            tracker.log(round_number, metrics)
            made, failed = metrics["candidates/made"], metrics["candidates/failed"]
            accuracy = "" if math.isnan(chosen := metrics["accuracy/chosen"]) else f"accuracy {chosen:.3f}   "
            counts = f"{made:.0f} candidates, {failed:.0f} failed   {pool.total_usage.tokens:,} tokens in total"
            console.show_line(f"round {round_number}   {accuracy}{counts}")

    with pool, closing(JsonlTracker(folder / "metrics.jsonl", resumed_step=0)) as tracker:
        async with AsyncExitStack() as stack:
            show = lambda: console.show_phase("solve", next(solved), total)  # noqa: E731
            evolution = await _start_evolution(prepared, pool, stack, log_round, show)
            await stack.enter_async_context(stall_monitor)
            with HEARTBEAT.record_call("the rounds"):
                stopped = await evolution.run(prepared.prompts)
    if stopped:
        note(f"the run ended early: {stopped}. Run the same command to resume.")
    console.end_live_view()
    write_results(pool, prepared.prompts, folder, stopped, console.terminal)


async def _start_evolution(
    prepared: EvolutionPreparation,
    pool: Pool,
    stack: AsyncExitStack,
    on_round: Callable[[int], None],
    on_solution: Callable[[], None],
) -> Evolution:
    """Start models, tools and graders, which `stack` closes."""
    config, folder = prepared.config, prepared.config.trainer.folder
    clients, engines = prepared.clients, prepared.engines
    if engines:
        start_reaper(new_run_id(), [])
        report_engine_progress(engines)
    for client in clients.values():
        stack.push_async_callback(client.close)
    rewards = RewardClient(config.reward, config.custom_reward_function)
    stack.push_async_callback(rewards.close)
    if toolbox := await open_toolbox(config.env):
        stack.push_async_callback(toolbox.close)
    for engine_client in engines.values():
        await engine_client.engine.start()
    await rewards.start()

    async def grade(prompt: Prompt, text: str) -> Score:
        has_truth = prepared.has_ground_truth(prompt)
        return await rewards.score(prompt, text) if has_truth else make_failed_score("the problem has no ground truth")

    services, agents = Services(grade, config.env, toolbox), {}
    caller = RoleCaller(config, pool, Budget(config.budget, pool, folder / STOP), clients, services)
    if config.env.env_name == "agent":
        agents = await stack.enter_async_context(open_agent_proposers(config, caller, engines, grade))
    return Evolution(
        config,
        pool,
        caller,
        partial(get_environment_spec(config.env.env_name).factory, services),
        grade,
        prepared.has_ground_truth,
        prepared.uses_reward,
        on_round,
        on_solution,
        agents,
    )
