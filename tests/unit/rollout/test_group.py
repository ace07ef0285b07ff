import asyncio
from dataclasses import replace

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.engines.protocol import EngineError
from alphaapollo.environments import get_environment_spec
from alphaapollo.environments.base import Services
from alphaapollo.rollout.episode import EpisodeLimits, run_group
from alphaapollo.types import GroupRequest, Prompt, Sampling, Score, TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed
from tests.unit.rollout.test_episode import make_runner

PROMPT = Prompt(17, "exact", "1 2")


async def grade(prompt: Prompt, text: str) -> Score:
    return Score(float(text.split()[0]))


def play(engine: FakeEngine, request: GroupRequest) -> TrajectoryGroup:
    make = get_environment_spec("single_turn").factory
    runner = make_runner(engine, EpisodeLimits(1, 60.0))
    return asyncio.run(run_group(request, runner.run, lambda _: make(Services(grade, Env()))))


def request(stream_position: int = 5, validate: bool = False) -> GroupRequest:
    return GroupRequest(PROMPT, 4, Sampling(8, seed=42), stream_position=stream_position, validate=validate)


def test_samples_are_in_order_and_differ():
    group = play(FakeEngine(100), request())
    assert group.prompt is PROMPT
    assert [trajectory.sample for trajectory in group.trajectories] == [0, 1, 2, 3]
    assert len({tuple(trajectory.rows[0].token_ids) for trajectory in group.trajectories}) == 4
    assert all(one.score.reward == one.turns[0].completion.token_ids[0] for one in group.trajectories)


def test_greedy_baseline_is_a_separate_additional_episode():
    asked: list[Sampling] = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        asked.append(sampling)
        return [1]

    group = play(FakeEngine(100, script=script), replace(request(), greedy_baseline=True))
    assert [trajectory.sample for trajectory in group.trajectories] == [0, 1, 2, 3]
    assert group.baseline is not None and group.baseline.sample == 4
    assert [sampling.temperature for sampling in asked] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert play(FakeEngine(100), request()).baseline is None


def test_seed_depends_on_run_purpose_position_prompt_sample_and_turn():
    seeds: list[int] = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        seeds.append(sampling.seed)
        return [1]

    play(FakeEngine(100, script=script), request())
    assert seeds == [derive_seed(42, "rollout", 5, 17, sample, 0) for sample in range(4)]
    play(FakeEngine(100, script=script), request(stream_position=0, validate=True))
    assert seeds[4:] == [derive_seed(42, "validate", 0, 17, sample, 0) for sample in range(4)]


def test_engine_error_cancels_the_other_episodes():
    cancelled = []

    class Failing(FakeEngine):
        async def generate(self, token_ids, sampling, request_id, images=()):
            if request_id == "rollout.5.17.2.0":
                raise EngineError("dead")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(request_id)
                raise

    with pytest.raises(EngineError, match="dead"):
        play(Failing(10), request())
    assert len(cancelled) == 3
