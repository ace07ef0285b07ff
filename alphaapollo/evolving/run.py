"""Prepare and run a self-evolution.

prepare_run: read the data, check the configuration, print the plan; starts no process.
run: start models, tools and graders, run the loop, write the results.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import EvolvingConfig, Model
from alphaapollo.controller.health.stall_monitor import StallMonitor
from alphaapollo.controller.placement import detect_machine
from alphaapollo.data.files import HELD_OUT, name_splits
from alphaapollo.data.images import collect_images
from alphaapollo.data.prompts import apply_length_limit, load_prompts
from alphaapollo.data.rendering import Renderer
from alphaapollo.environments.base import Services, get_environment_spec
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.evolving.agents import open_agent_proposers
from alphaapollo.evolving.budget import STOP, Budget
from alphaapollo.evolving.candidates import CandidateMaker, Grader, compute_prompt_digest
from alphaapollo.evolving.loop import EvolutionLoop
from alphaapollo.evolving.model_clients import (
    EngineClient,
    ModelClient,
    ServerClient,
    check_models_and_load_renderers,
    make_engine_clients,
    report_engine_progress,
)
from alphaapollo.evolving.pool import FILE, Pool
from alphaapollo.evolving.report import compute_round_metrics, write_results
from alphaapollo.evolving.role_calls import RoleModelCaller, make_roles
from alphaapollo.launch.input_checks import check_rewards, find_environment_spec
from alphaapollo.observability.console import Console
from alphaapollo.planning.plan_table import print_plan_table
from alphaapollo.planning.try_environment import try_environment, try_environment_resets
from alphaapollo.processes.watchdog import new_run_id, start_reaper
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.registry import is_gradable
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.resume import StartPoint, find_inference_start
from alphaapollo.runs.run_history import RunPlan
from alphaapollo.types import Prompt
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.user_module import load_user_module


@dataclass(frozen=True)
class PreparedEvolution:
    """Checked inputs of a self-evolution run that has not started any process."""

    config: EvolvingConfig
    prompts: list[Prompt]
    renderers: Mapping[str, Renderer]  # renderers of the models that this run serves, by name
    uses_reward: bool  # True: the environment scores with the reward function
    start: StartPoint
    notices: list[str]

    @property
    def folder(self) -> Path:
        return self.config.trainer.folder

    @property
    def branches(self) -> list[str]:
        """Model name of each branch."""
        return self.config.branches

    @property
    def solutions_per_problem(self) -> int:
        return self.config.evolving.rounds * len(self.branches) * self.config.data.n_samples

    def has_ground_truth(self, prompt: Prompt) -> bool:
        """Whether solutions of a problem can be graded."""
        return bool(self.config.custom_reward_function.path) or is_gradable(prompt)


def prepare_run(config: EvolvingConfig, console: Console) -> PreparedEvolution:
    """Check everything that can be checked without starting a model, and print the plan. Raises ValueError if the
    configuration, the data or the run folder is invalid."""
    serves = any(model.path for model in config.models.values())
    notices = check_config_and_get_notices(config, detect_machine().num_gpus if serves else 0)
    if config.evolving.custom_module:
        load_user_module(config.evolving.custom_module, "evolving.custom_module")
    make_roles(config.all_roles)
    environment = find_environment_spec(config.env)
    renderers = check_models_and_load_renderers(config) if serves else {}
    prompts = load_prompts(name_splits(config.data.path, HELD_OUT, notices), config.data.prompt_key)
    if any(collect_images(prompt.content) for prompt in prompts):
        raise ValueError(
            f"data.path={config.data.path} has prompts with images, but roles exchange texts only. Remove these rows."
        )
    for renderer in renderers.values():
        total, limit = len(prompts), config.data.max_prompt_length
        prompts, num_long = apply_length_limit(prompts, renderer, limit, config.data.truncation)
        if num_long:
            notices.append(f"{num_long} of {total} problems exceed data.max_prompt_length.")
    for name, model in config.models.items():
        if not model.path:
            ServerClient(name, model)  # raises if the openai package or the key is missing
    graded = environment.is_graded(config.env)
    start = find_inference_start(config, FILE)
    prepared = PreparedEvolution(config, prompts, renderers, graded, start, notices)
    if not prepared.start.replaces_previous_run:
        _check_pool_matches_data(prepared)
    gradable = [prompt for prompt in prompts if prepared.has_ground_truth(prompt)]
    if graded and len(gradable) < len(prompts):
        notices.append(
            f"{len(prompts) - len(gradable)} of {len(prompts)} problems have no ground truth. They are solved, but "
            "excluded from all accuracies."
        )
    if gradable:
        notices += check_rewards(gradable, config.reward, config.custom_reward_function, graded)[0]
    if config.env.env_name == "agent":
        for served in [config.models[name] for name in config.proposer_models]:
            keys = {name: getattr(served, name) for name in ("path", "tokenizer_path", "trust_remote_code")}
            notices += try_environment(config.env, prompts[:1], Model(**keys), config.data)
    else:
        asyncio.run(try_environment_resets(config.env, prompts[:1]))
    notices += start.describe()
    print_plan_table(prepared.folder, make_run_plan(prepared), console)
    return prepared


def _check_pool_matches_data(prepared: PreparedEvolution) -> None:
    """Raise ValueError if the run folder has results for other data than data.path."""
    rows = {prompt.id: compute_prompt_digest(prompt) for prompt in prepared.prompts}
    for candidate in Pool(prepared.folder).candidates.values():
        if rows.get(candidate.id.problem) != candidate.row:
            raise ValueError(
                f"{prepared.folder} has results for other data: row {candidate.id.problem} of data.path has changed "
                f"since candidate {candidate.key} was generated for it. Set another trainer.experiment_name, or "
                "trainer.resume_mode=disable."
            )


async def run(prepared: PreparedEvolution, console: Console) -> None:
    """Run or resume the evolution until its end or the end of the budget, and write the results."""
    config, folder, note = prepared.config, prepared.folder, console.notify
    if moved := prepared.start.prepare_folder(config, make_run_plan(prepared)):
        note(f"the previous run of this name was moved to {moved}")
    pool = Pool(folder)
    if pool.incomplete_bytes:
        note(f"{pool.path} ends with an incomplete last line of {pool.incomplete_bytes} bytes, which is removed")
    if pool.calls:
        counts = f"{len(pool.calls)} calls, {len(pool.candidates)} candidates, {len(pool.judgements)} judgements"
        note(f"resuming from {counts}")
    (folder / STOP).unlink(missing_ok=True)  # left by an earlier process
    problems = [prompt.id for prompt in prepared.prompts]
    with pool, closing(JsonlTracker(folder / "metrics.jsonl", resumed_step=0)) as tracker:

        def log_round(round_number: int) -> None:
            metrics = compute_round_metrics(pool, problems, round_number)
            if metrics["cost/calls"]:
                tracker.log(round_number, metrics)
                made, failed = metrics["candidates/made"], metrics["candidates/failed"]
                accuracy = "" if math.isnan(chosen := metrics["accuracy/chosen"]) else f"accuracy {chosen:.3f}   "
                counts = f"{made:.0f} candidates, {failed:.0f} failed   {pool.total_usage.tokens:,} tokens in total"
                console.show_line(f"round {round_number}   {accuracy}{counts}")

        device = resolve_device(config.trainer.device, detect_machine().num_gpus) if prepared.renderers else "cpu"
        stall_monitor = StallMonitor([], config.trainer, device, note, lambda: "run the same command to resume")

        solved, total = count(1), len(problems) * prepared.solutions_per_problem
        async with (
            _start_loop(prepared, pool, log_round, lambda: console.show_phase("solve", next(solved), total)) as loop,
            stall_monitor,
        ):
            with HEARTBEAT.record_call("the rounds"):
                stopped = await loop.run(prepared.prompts)
    if stopped:
        note(f"the run ended early: {stopped}. Run the same command to resume.")
    console.end_live_view()
    write_results(pool, prepared.prompts, folder, stopped, console.terminal)


@asynccontextmanager
async def _start_loop(
    prepared: PreparedEvolution, pool: Pool, on_round: Callable[[int], None], on_solution: Callable[[], None]
) -> AsyncIterator[EvolutionLoop]:
    """Context manager that starts models, tools and graders, yields the loop, and stops everything at the end."""
    config, evolving = prepared.config, prepared.config.evolving
    async with AsyncExitStack() as stack:
        clients: dict[str, ModelClient] = {
            name: ServerClient(name, model) for name, model in config.models.items() if not model.path
        }
        engines: dict[str, EngineClient] = {}
        if prepared.renderers:
            start_reaper(new_run_id(), [])
            engines = make_engine_clients(config, prepared.renderers, prepared.folder)
            report_engine_progress(engines)
            clients |= engines
        for client in clients.values():
            stack.push_async_callback(client.close)
        rewards = RewardClient(config.reward, config.custom_reward_function)
        stack.push_async_callback(rewards.close)
        toolbox = await open_toolbox(config.env)
        if toolbox:
            stack.push_async_callback(toolbox.close)
        for engine_client in engines.values():
            await engine_client.engine.start()
        await rewards.start()
        budget = Budget(config.budget, pool.total_usage, pool.seconds, prepared.folder / STOP)
        grader = Grader(rewards.score, prepared.has_ground_truth, prepared.uses_reward)
        services = Services(grader.grade, config.env, toolbox)
        roles = RoleModelCaller(config, pool, budget, clients, services)
        environment, agents = get_environment_spec(config.env.env_name), {}
        if config.env.env_name == "agent":
            agents = await stack.enter_async_context(open_agent_proposers(config, roles, engines, grader.grade))
        yield EvolutionLoop(
            evolving,
            prepared.branches,
            config.data.n_samples,
            pool,
            CandidateMaker(roles, pool, grader, lambda: environment.factory(services), evolving.votes, agents),
            on_round,
            on_solution,
        )


def make_run_plan(prepared: PreparedEvolution) -> RunPlan:
    """Describe problems, models, roles and budget of a run, and all notices."""
    config = prepared.config
    evolving = config.evolving
    limits = config.budget.model_dump(exclude_none=True)
    roles = [
        f"{slot} {role.plugin}{f' ({role.model})' if role.model else ''}"
        for slot, role in config.all_roles.items()
        if role.plugin
    ]
    models = [f"{name}: {model.path or model.base_url or model.name}" for name, model in config.models.items()]
    settings = {
        "problems": f"{len(prepared.prompts)} x {prepared.solutions_per_problem} solutions: "
        f"{evolving.rounds} round(s) x {len(prepared.branches)} branch(es) x {config.data.n_samples}",
        "verifiers": f"{evolving.votes} per solution",
        "models": ", ".join(models),
        "branches": ", ".join(prepared.branches),
        "roles": ", ".join(roles),
        "memory": f"{evolving.memory_size} past solutions ({evolving.memory_type})",
        "budget": f"{', '.join(f'{name} {value:g}' for name, value in limits.items()) or 'unlimited'}; "
        f"to stop: touch {prepared.folder / STOP}",
    }
    return RunPlan(settings, notices=prepared.notices)
