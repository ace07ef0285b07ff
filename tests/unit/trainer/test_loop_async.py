"""The asynchronous loop over simulated engines: staleness, and accounting of every prompt."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Config, Trainer
from alphaapollo.controller.errors import EngineCoreDied
from alphaapollo.session.progress import CurriculumState, Feedback, Progress, TrainingGoal
from alphaapollo.trainer import loop
from alphaapollo.trainer.step.collect import COUNTED_EVENTS, compute_staleness_metrics, take_stream_positions
from alphaapollo.trainer.step.update_result import UpdateResult
from alphaapollo.types import EpisodeEnd, GroupRequest, Outcome, Prompt, Row, Score, Trajectory, TrajectoryGroup
from tests.unit import virtual_time
from tests.unit.metric_names import undocumented
from tests.unit.trainer.fakes import do_nothing, make_run_state
from tests.unit.trainer.samples import group, trajectory

SIZE, PROMPTS = 3, 50


class Killed(Exception):
    pass


class Engines:
    """Groups take mostly one second, sometimes twenty, as a function of their draw. One in eight fails, one in
    eight has equal rewards. One token per second; a publish makes a new version."""

    def __init__(self, seed: int):
        self.seed, self.version = seed, 0
        self.played: list[int] = []
        self.prompts: dict[int, int] = {}  # position -> prompt
        self.calls: list[str] = []
        self.memory_metrics: dict[str, float] = {}

    async def generate_group(self, request: GroupRequest) -> TrajectoryGroup:
        draws = random.Random(f"{self.seed}:{request.stream_position}")
        self.played.append(request.stream_position)
        self.prompts[request.stream_position] = request.prompt.id
        versions = []
        for _ in range(draws.choice([1, 1, 1, 2, 3, 20])):
            versions.append(self.version)
            await asyncio.sleep(1)
        kind = draws.randrange(8)
        outcome = Outcome.GRADER_FAILED if kind == 0 else Outcome.SCORED
        rewards = [math.nan] * 2 if kind == 0 else [1.0, 1.0 if kind == 1 else 0.0]
        own = [trajectory(sample, reward, len(versions), outcome) for sample, reward in enumerate(rewards)]
        for one in own:
            one.rows[0].weight_versions = [(version, versions.count(version)) for version in sorted({*versions})]
        return replace(group(*own), prompt=replace(request.prompt, extra_info={"draw": request.stream_position}))

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[int, TrajectoryGroup]]:
        for index, request in enumerate(requests):
            yield index, await self.generate_group(request)

    async def sleep(self, pauses_requests: bool) -> None:
        self.calls += ["pause"] * pauses_requests + ["sleep"]


def make_run(
    steps: int = 12,
    staleness: int = 2,
    mode: str = "separate",
    seed: int = 0,
    dynamic: bool = False,
    die_at: int = 0,
    epochs: int | None = None,
    sampler: str = "uniform",
) -> Any:
    """An update takes two seconds; `run.trained` has the draws of each iteration."""
    settings = {
        "data": {"train_batch_size": SIZE, "sampler": sampler},
        "trainer": {"save_freq": 2, "test_freq": -1, "async_mode": mode, "max_staleness": staleness},
        "algorithm": {"filter_groups": {"enable": dynamic}, "rollout_correction": {"method": "tis"}},
    }
    config = Config.model_validate(
        {**settings, "env": {"rollout": {"n": 2}}, "actor_rollout_ref": {"rollout": {"name": "fake"}}}
    )
    engines = Engines(seed)

    async def learn(run: Any, step: int, groups: list[TrajectoryGroup], timer: Any) -> UpdateResult:
        if step == die_at:
            raise Killed
        await asyncio.sleep(2)
        run.trained[step] = groups
        return UpdateResult({}, Feedback(), trained_tokens=1)

    async def publish(version: int) -> dict[str, float]:
        engines.version = version
        return {}

    prompts = [Prompt(index, "test", "text") for index in range(PROMPTS)]
    workers = SimpleNamespace(
        policy=SimpleNamespace(memory_metrics={}), critic=None, reward_model=None, engines=engines
    )
    run = make_run_state(
        config,
        prompts,
        workers,
        weights=SimpleNamespace(publish=publish, hand_over=engines.sleep),
        learn=learn,
        goal=TrainingGoal.from_settings(
            Trainer(total_training_steps=None if epochs else steps, total_epochs=epochs or 1), PROMPTS, SIZE
        ),
        trained={},
    )
    run.metric_sources = [run.sampler]
    return run


def train(run: Any) -> Any:
    virtual_time.run(loop.train_async(run))
    return run


def get_saved(run: Any) -> dict[str, Any]:
    """Progress of the checkpoint of a run that dies in iteration 7."""
    with pytest.raises(Killed):
        train(run)
    return run.session.checkpoint_writer.saved[6]


def draws_of(groups: list[TrajectoryGroup]) -> list[int]:
    return [one.prompt.extra_info["draw"] for one in groups]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_staleness_is_bounded_and_every_prompt_is_used_once(seed: int, staleness: int, dynamic: bool) -> None:
    run = train(make_run(staleness=staleness, seed=seed, dynamic=dynamic))
    assert sorted(run.trained) == list(range(1, 13))
    for step, groups in run.trained.items():
        assert len(groups) == SIZE and draws_of(groups) == sorted(draws_of(groups))
        oldest = min(version for one in groups for t in one.trajectories for version, _ in t.rows[0].weight_versions)
        assert 0 <= step - 1 - oldest <= staleness
    every = [draw for groups in run.trained.values() for draw in draws_of(groups)]
    assert len(every) == len(set(every))
    assert sorted(run.workers.engines.played) == list(range(run.progress.prompts_consumed))  # each once
    assert run.progress.unfinished == []
    assert max(line["staleness/max"] for line in run.session.tracker.lines) > 0  # it runs ahead
    check_counts(run, dynamic)


def check_counts(run: Any, dynamic: bool) -> None:
    """Every group that was started is trained on, dropped or carried to the next iteration."""
    carried, ready, total = 0.0, 0.0, dict.fromkeys(COUNTED_EVENTS, 0.0)
    for line in run.session.tracker.lines:
        gone = line["async/trained"] + line["async/dropped_failed"] + line["async/dropped_no_signal"]
        assert carried + line["async/started"] == gone + line["async/carried"]
        assert ready + line["async/finished"] == gone + line["async/ready"]
        carried, ready = line["async/carried"], line["async/ready"]
        total = {name: total[name] + line[f"async/{name}"] for name in COUNTED_EVENTS}
    assert total["started"] == run.progress.prompts_consumed == total["finished"]
    assert total["trained"] == 12 * SIZE and total["dropped_failed"] > 0
    assert (total["dropped_no_signal"] > 0) is dynamic
    assert undocumented(name for line in run.session.tracker.lines for name in line) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_resumed_run_generates_every_prompt_once(seed: int) -> None:
    run = make_run(seed=seed, die_at=7)
    saved = get_saved(run)
    kept = [draw for step in range(1, 7) for draw in draws_of(run.trained[step])]
    assert saved["unfinished"] and not set(kept) & set(saved["unfinished"])
    resumed = make_run(seed=seed)
    resumed.progress = Progress(**saved | {"unfinished": list(saved["unfinished"])})
    resumed.workers.engines.version = 6
    train(resumed)
    after = [draw for groups in resumed.trained.values() for draw in draws_of(groups)]
    assert sorted(resumed.trained) == list(range(7, 13)) and not set(after) & set(kept)
    dropped = sum(
        line["async/dropped_failed"] for line in [*run.session.tracker.lines[:6], *resumed.session.tracker.lines]
    )
    assert len(after) + len(kept) + dropped == resumed.progress.prompts_consumed
    assert set(saved["unfinished"]) <= set(resumed.workers.engines.played)
    first = resumed.session.tracker.lines[0]
    gone = first["async/trained"] + first["async/dropped_failed"]
    assert len(saved["unfinished"]) + first["async/started"] == gone + first["async/carried"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_resumed_run_generates_the_prompts_that_were_in_flight(dynamic: bool) -> None:
    run = make_run(die_at=7, sampler="frontier", dynamic=dynamic)
    saved = get_saved(run)
    drawn, first = saved["curriculum"]["drawn"], run.workers.engines.prompts
    assert drawn and drawn == {position: first[position] for position in saved["unfinished"]}
    assert len(set(drawn.values())) == len(drawn)
    resumed = make_run(sampler="frontier", dynamic=dynamic)
    resumed.progress = Progress(**saved | {"curriculum": CurriculumState(**saved["curriculum"])})
    resumed.workers.engines.version = 6
    train(resumed)
    assert drawn.items() <= resumed.workers.engines.prompts.items()
    assert resumed.progress.curriculum.drawn == {}
    assert undocumented(name for line in resumed.session.tracker.lines for name in line) == []


def test_the_last_epoch_leaves_no_started_prompt_unused() -> None:
    run = train(make_run(epochs=1))
    assert run.progress.prompts_consumed == 48 and run.progress.unfinished == []  # 16 batches of 50 prompts
    dropped = sum(line["async/dropped_failed"] for line in run.session.tracker.lines)
    assert sum(map(len, run.trained.values())) == 48 - dropped
    assert len(run.session.tracker.lines) <= 16


@pytest.mark.parametrize("mode", ["carry", "separate"])
@pytest.mark.parametrize("seed", range(4))
def test_groups_of_an_engine_that_dies_are_started_again(seed: int, mode: str) -> None:
    """Also of one that dies during an update, and that the next publish replaces."""
    run, deaths = make_run(seed=seed, mode=mode), list[int]()
    engines = run.workers.engines
    play = engines.generate_group

    async def die_or_play(request: GroupRequest) -> TrajectoryGroup:
        if request.stream_position % 5 == 0 and request.stream_position not in deaths:
            deaths.append(request.stream_position)
            await asyncio.sleep(request.stream_position % 4)
            raise EngineCoreDied("engine 0", "rollout")
        return await play(request)

    async def replace_engine(death: Exception) -> None:
        engines.calls.append("replace")
        await asyncio.sleep(5)

    engines.generate_group, engines.replace_engine = die_or_play, replace_engine
    train(run)
    assert engines.calls.count("replace") > 0 and len(deaths) > 5
    assert sorted(engines.played) == list(range(run.progress.prompts_consumed))  # each once
    check_counts(run, dynamic=False)


RIGHT, FAILED = trajectory(0, 1.0, 1), trajectory(1, math.nan, 1, Outcome.GRADER_FAILED)
BROKEN = replace(FAILED, score=Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason="broken"))
EMPTY = Trajectory(0, 0, [], [], Score(0.0, reason="the prompt is too long"), EpisodeEnd.PROMPT_LIMIT)
UNUSABLE = {
    "grader": (group(FAILED, FAILED), r"trajectory, grader_failed"),
    "environment": (group(BROKEN), r"trajectory, environment_failed.*broken"),
    "no tokens": (group(EMPTY, FAILED), r"trajectory, scored.*too long"),
    "baseline not graded": (group(RIGHT, baseline=FAILED), r"greedy baseline, grader_failed"),
    "environment of the baseline": (group(RIGHT, baseline=BROKEN), r"greedy baseline, environment_failed.*broken"),
    "no variance": (group(RIGHT, RIGHT), None),
}


@pytest.mark.parametrize("good", [0, 8])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("reason", UNUSABLE)
def test_groups_in_vain_end_the_run(reason: str, is_async: bool, good: int, capsys: pytest.CaptureFixture[str]) -> None:
    """All groups after the first `good` ones cannot be trained on."""
    unusable, error = UNUSABLE[reason]

    async def play(request: GroupRequest) -> TrajectoryGroup:
        await asyncio.sleep(1)
        return group(RIGHT, trajectory(1, 0.0, 1)) if request.stream_position < good else unusable

    run = make_run(steps=4, dynamic=reason == "no variance")
    run.workers.engines.generate_group = play
    run.session.publisher.hand_over = do_nothing
    loops = loop.train_async if is_async else loop.train
    if error:
        with pytest.raises(ValueError, match=f"none of the .* groups .*{error}"):
            virtual_time.run(loops(run))
    else:
        virtual_time.run(loops(run))
    counts = [3, 3, 2] if good else []
    assert [len(groups) for groups in run.trained.values()] == counts + [0] * (0 if error else 4 - len(counts))
    shown = " ".join(capsys.readouterr().out.split())
    assert ("training on 2 instead of 3 groups" in shown) is (good > 0 and (is_async or not error))


def test_the_synchronous_loop_takes_unfinished_prompts_first() -> None:
    progress = Progress(prompts_consumed=7, unfinished=[3, 5])
    assert take_stream_positions(progress, 4) == [3, 5, 7, 8]
    assert (progress.prompts_consumed, progress.unfinished) == (9, [])
    assert take_stream_positions(progress, 2) == [9, 10]


def test_staleness_counts_weight_versions() -> None:
    def aged(*versions: tuple[int, int]) -> Trajectory:
        one = trajectory(0, 1.0, sum(count for _, count in versions))
        return replace(one, rows=[replace(one.rows[0], weight_versions=list(versions))])

    figures = compute_staleness_metrics([group(aged((4, 2), (5, 1)), aged((7, 1)))], trained_version=7)
    assert figures == {"staleness/mean": (3 + 3 + 2 + 0) / 4, "staleness/max": 3.0, "staleness/mixed": 0.5}
    assert compute_staleness_metrics([], trained_version=7) == {}
    assert Row([1], [1], [0.0], [0]).weight_versions == []


def test_the_reward_model_scores_when_a_batch_may_be_complete() -> None:
    """Not for each group: on shared GPUs each phase costs the engines their caches."""
    run = make_run(steps=4, staleness=1, mode="carry")
    scored: list[int] = []

    async def score_groups(groups: Any) -> None:
        scored.append(len(list(groups)))

    run.reward_model_scorer = SimpleNamespace(score_groups=score_groups, pop_metrics=dict)
    train(run)
    assert sum(scored) == sum(line["async/finished"] for line in run.session.tracker.lines)
    assert scored[0] == SIZE and len(scored) < 0.6 * sum(scored)
