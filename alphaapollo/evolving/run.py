"""prepare: read, check, print the plan (nothing is started)  ->  run: models, tools and graders up, the rounds, the
choices, the results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.config.check_evolving import check_evolving, roles_of
from alphaapollo.config.diff import Verdict as ChangeVerdict
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.controller.health.stall_monitor import Patience, StallWatch
from alphaapollo.controller.worker_counts import detect_machine
from alphaapollo.data.prompts import load_prompts
from alphaapollo.data.rendering import Renderer, fit_prompts
from alphaapollo.environments.actions import make_actions
from alphaapollo.environments.base import Services, get_registered
from alphaapollo.environments.run_tools import open_toolbox
from alphaapollo.evolving.asker import Asker
from alphaapollo.evolving.budget import STOP, Budget
from alphaapollo.evolving.cast import Cast, fill
from alphaapollo.evolving.client import Client
from alphaapollo.evolving.judging import Judge
from alphaapollo.evolving.metrics import round_metrics, spent_in
from alphaapollo.evolving.play import Limits
from alphaapollo.evolving.pool import FILE, Pool
from alphaapollo.evolving.results import write_results
from alphaapollo.evolving.rounds import Evolution, Shape
from alphaapollo.evolving.selection import Selector, chosen_by_vote
from alphaapollo.evolving.server_client import ServerClient
from alphaapollo.evolving.solving import Solver, Truth, row_digest
from alphaapollo.launch.input_checks import check_rewards, find_environment
from alphaapollo.launch.resume import Start, own_changes
from alphaapollo.launch.try_environment import try_resets
from alphaapollo.observability.metrics_file import JsonlTracker
from alphaapollo.observability.terminal import Terminal
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.registry import is_gradable
from alphaapollo.rollout.sync_calls import SyncCalls
from alphaapollo.types import Prompt
from alphaapollo.utils.heartbeat import PULSE
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.utils.watchdog import name_run, start_reaper

FREE = {  # keys that may change where a run goes on: how much is done, and how what is asked is reached
    "evolving.rounds": "so many rounds in all",
    "evolving.select": "the choice is made anew",
    "evolving.finalists": "the choice is made anew",
    "evolving.max_failures": "",
    "models": "a reply stands as it is; a model that was moved answers what is still to be asked",
    "env.episode_timeout": "",
    "reward.timeout": "",
    "reward.num_workers": "",
}
DECISIVE = {  # of the sections that may change: what may not
    "budget": (),
    "rollout": ("name", "dtype", "engine_kwargs.vllm"),
    "trainer": ("seed",),
}


@dataclass(frozen=True)
class Prepared:
    """An evolution that has passed every check and has started nothing."""

    config: EvolvingConfig
    prompts: list[Prompt]
    renderers: Mapping[str, Renderer]  # of the models that this run serves
    graded: bool  # the environment scores by the reward function
    start: Start

    @property
    def folder(self) -> Path:
        return self.config.trainer.folder

    @property
    def branches(self) -> tuple[str, ...]:
        """The model of each."""
        return tuple(self.config.evolving.branches or [next(iter(self.config.models))])

    def knows_truth(self, prompt: Prompt) -> bool:
        """Can its solutions be graded?"""
        return bool(self.config.custom_reward_function.path) or is_gradable(prompt)


def prepare(config: EvolvingConfig, terminal: Terminal) -> Prepared:
    """Check everything that can be checked without a model, and print the plan (ValueError: what cannot be done)."""
    serves = any(model.path for model in config.models.values())
    notices = check_evolving(config, detect_machine().num_gpus if serves else 0)
    if config.evolving.custom_module:
        load_user_module(config.evolving.custom_module, "evolving.custom_module")
    fill(config.roles, config.data.max_response_length)
    environment = find_environment(config.env)
    renderers: Mapping[str, Renderer] = {}
    if serves:
        from alphaapollo.evolving.own_engines import check_own_models  # brings torch

        renderers = check_own_models(config)
    prompts = load_prompts(config.data.path, config.data.prompt_key)
    for renderer in renderers.values():
        prompts, lengths = fit_prompts(prompts, renderer, config.data.max_prompt_length, config.data.truncation)
        if lengths.too_long:
            notices.append(f"{lengths.too_long} of {lengths.total} problems are over data.max_prompt_length.")
    for name, model in config.models.items():
        if model.base_url or model.name:
            ServerClient(name, model)  # the package and the key are there
    prepared = Prepared(config, prompts, renderers, environment.graded, _find_start(config, prompts))
    known = [prompt for prompt in prompts if prepared.knows_truth(prompt)]
    if environment.graded and len(known) < len(prompts):
        notices.append(
            f"{len(prompts) - len(known)} of {len(prompts)} problems have no ground truth that can be graded: they are "
            "solved, and in no figure."
        )
    if known:
        notices += check_rewards(known, config.reward, config.custom_reward_function, environment.graded)[0]
    asyncio.run(try_resets(config.env, prompts[:1]))
    _print_plan(prepared, [*notices, *prepared.start.lines()], terminal)
    return prepared


def _find_start(config: EvolvingConfig, prompts: list[Prompt]) -> Start:
    """ValueError: the folder's run is another one, or of other problems."""
    folder = config.trainer.folder
    if config.trainer.resume_mode == "disable":
        return Start(folder, in_the_way=folder.exists())
    if not (folder / FILE).exists():
        return Start(folder)
    changes = own_changes(config, change_rule)
    rows = {prompt.id: row_digest(prompt) for prompt in prompts}
    for one in Pool(folder).candidates.values():
        if rows.get(one.place.problem) != one.row:
            raise ValueError(
                f"{folder}: its {one.key} is no solution of row {one.place.problem} of data.path as it is now: these "
                "are results of other data. Set another trainer.experiment_name, or trainer.resume_mode=disable."
            )
    return Start(folder, changes=tuple(changes))


def change_rule(key: str) -> tuple[ChangeVerdict, str]:
    """What decides what is asked must stay as it is."""
    section, _, name = key.partition(".")
    if key in FREE or name not in DECISIVE.get(section, (name,)):
        return "applied", FREE.get(key, "")
    return "refused", "it decides what is asked, or of whom"


async def run(prepared: Prepared, terminal: Terminal) -> None:
    """To the end, or as far as the budget goes; what an earlier process has done stands."""
    config, folder = prepared.config, prepared.folder
    if moved := prepared.start.claim(config):
        terminal.print(f"note: the earlier run of this name lies in {moved}", markup=False, soft_wrap=True)
    pool = Pool(folder)
    _tell_resumed(pool, terminal)
    (folder / STOP).unlink(missing_ok=True)  # of an earlier process
    problems = [prompt.id for prompt in prepared.prompts]
    with pool, closing(JsonlTracker(folder / "metrics.jsonl", resumed_step=0)) as metrics:  # anew, as all that is made

        def told(number: int) -> None:
            if spent_in(pool, number).calls:
                _tell_round(pool, prepared, number, terminal)
                metrics.log(number, round_metrics(pool, problems, number))

        async with _evolution(prepared, pool, told) as evolution, _stall_watch(prepared, terminal):
            with PULSE.doing("the rounds"):
                halted = await evolution.evolve(prepared.prompts)
    if halted:
        terminal.print(f"note: it ended early: {halted}. The same command goes on.", markup=False, soft_wrap=True)
    write_results(pool, prepared.prompts, folder, halted, terminal)


@asynccontextmanager
async def _evolution(prepared: Prepared, pool: Pool, told: Callable[[int], None]) -> AsyncIterator[Evolution]:
    """Everything up, and down again whatever happens."""
    config = prepared.config
    async with AsyncExitStack() as stack:
        clients = make_clients(prepared)
        for client in clients.values():
            stack.push_async_callback(client.close)
        rewards = RewardClient(
            config.custom_reward_function.path,
            config.custom_reward_function.name,
            config.reward.timeout,
            config.reward.num_workers,
            config.reward.components,
            config.reward.required,
            config.reward.judge,
            config.reward.custom_module,
        )
        stack.push_async_callback(rewards.close)
        toolbox = await open_toolbox(config.env)
        if toolbox:
            stack.push_async_callback(toolbox.close)
        for client in clients.values():
            await client.start()
        await rewards.start()
        budget = Budget(config.budget, pool.total, pool.seconds, prepared.folder / STOP)
        asker = Asker(pool, budget, clients, config.models, config.trainer.seed, config.evolving.max_failures)
        truth = Truth.of(rewards.score, prepared.knows_truth, prepared.graded)
        services = Services(truth.score, config.env, toolbox)
        cast = Cast(
            asker,
            fill(config.roles, config.data.max_response_length),
            config.evolving.asks,
            Limits(config.env.max_steps, config.env.episode_timeout),
            toolbox,
            make_actions(services) if toolbox else None,
            SyncCalls(),
        )
        environment = get_registered(config.env.env_name)
        yield Evolution(
            Shape(
                config.evolving.rounds,
                prepared.branches,
                config.data.n_samples,
                config.evolving.memory_size,
                config.evolving.memory_type,
            ),
            pool,
            budget,
            Solver(cast, pool, truth, lambda: environment.factory(services)),
            Judge(cast, pool, config.evolving.votes),
            Selector(
                cast,
                pool,
                prepared.branches[0],
                config.evolving.finalists if config.evolving.select == "tournament" else None,
            ),
            told,
        )


def _stall_watch(prepared: Prepared, terminal: Terminal) -> StallWatch:
    trainer = prepared.config.trainer
    return StallWatch(
        [],
        Patience(trainer.stall_notice, trainer.stall_timeout),
        resolve_device(trainer.device, detect_machine().num_gpus) if prepared.renderers else "cpu",
        prepared.folder,
        lambda text: terminal.print(f"note: {text}", markup=False, soft_wrap=True),
        lambda: "stopped; the same command goes on",
    )


def make_clients(prepared: Prepared) -> dict[str, Client]:
    """One a model, still to be started."""
    models = prepared.config.models
    clients: dict[str, Client] = {
        name: ServerClient(name, model) for name, model in models.items() if name not in prepared.renderers
    }
    if prepared.renderers:
        from alphaapollo.evolving.own_engines import make_engine_clients, watch_engines  # brings torch

        start_reaper(name_run(), [])
        own = make_engine_clients(prepared.config, prepared.renderers, prepared.folder)
        watch_engines(own)
        clients |= own
    return clients


def _tell_resumed(pool: Pool, terminal: Terminal) -> None:
    if pool.cut:
        terminal.print(f"note: a torn last line of {pool.cut} bytes goes: its call is made again", soft_wrap=True)
    if pool.calls:
        whole = len(pool.candidates), len(pool.judgements)
        terminal.print(
            f"note: goes on from {len(pool.calls)} calls, {whole[0]} candidates, {whole[1]} judgements",
            soft_wrap=True,
        )


def _tell_round(pool: Pool, prepared: Prepared, number: int, terminal: Terminal) -> None:
    """`round 2   accuracy of what is chosen so far 0.750   128 candidates, 3 failed   41,203 tokens`"""
    chosen = [chosen_by_vote(pool, prompt.id, number + 1) for prompt in prepared.prompts]
    graded = [one.right for one in chosen if one is not None and one.right is not None]
    accuracy = f"accuracy of what is chosen so far {sum(graded) / len(graded):.3f}   " if graded else ""
    own = [one for one in pool.candidates.values() if one.place.round == number]
    failed = sum(bool(one.failure) for one in own)
    terminal.print(
        f"round {number}   {accuracy}{len(own)} candidates, {failed} failed   {pool.total.tokens:,} tokens in all",
        markup=False,
        soft_wrap=True,
    )


def _print_plan(prepared: Prepared, notices: list[str], terminal: Terminal) -> None:
    config = prepared.config
    evolving, budget = config.evolving, config.budget
    solutions = evolving.rounds * len(prepared.branches) * config.data.n_samples
    limits = [f"{name} {value:g}" for name, value in budget.model_dump(exclude={"reserve"}).items() if value]
    roles = [
        f"{slot} {role.plugin}{f' ({role.model})' if role.model else ''}"
        for slot, role in roles_of(config).items()
        if role.plugin and (slot != "referee" or evolving.select == "tournament")
    ]
    models = [f"{name}: {model.path or model.base_url or model.name}" for name, model in config.models.items()]
    lines = [
        f"{prepared.folder}",
        f"  problems   {len(prepared.prompts)} x {solutions} solutions: {evolving.rounds} round(s) x "
        f"{len(prepared.branches)} branch(es) x {config.data.n_samples}",
        f"  verifiers  {evolving.votes} a solution",
        f"  models     {', '.join(models)}",
        f"  branches   {', '.join(prepared.branches)}",
        f"  roles      {', '.join(roles)}",
        f"  memory     {evolving.memory_size} past solutions ({evolving.memory_type})",
        f"  choice     {evolving.select}",
        f"  budget     {', '.join(limits) or 'none'}; to stop: touch {prepared.folder / STOP}",
        *(f"note: {notice}" for notice in notices),
    ]
    terminal.print("\n".join(lines), markup=False, soft_wrap=True)
