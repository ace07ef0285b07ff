"""Time limits of episodes."""

import asyncio
import threading

import pytest

from alphaapollo.engines.fake import FakeEngine
from alphaapollo.environments.base import StepResult
from alphaapollo.processes.time_limit import exclude_from_time_limit
from alphaapollo.rollout.episode import EpisodeLimits, EpisodeTask
from alphaapollo.types import EpisodeEnd, Prompt, Sampling, Score, Trajectory
from scripts.simulation.timed_engine import TimedFakeEngine
from tests.unit import virtual_time
from tests.unit.rollout.test_episode import PROMPT, STOP, Environment, done, make_runner, play, show


class Waiting(Environment):
    """Takes 3 s per turn, plus 100 s of waiting in a queue."""

    async def step(self, action: str) -> object:
        await asyncio.sleep(3)
        with exclude_from_time_limit():
            await asyncio.sleep(100)
        return await super().step(action)


@pytest.mark.parametrize(("seconds", "end"), [(7.0, EpisodeEnd.DONE), (5.0, EpisodeEnd.TIME_LIMIT)])
def test_time_limit_counts_environment_time_only(seconds, end):
    """Neither the engine (with its own queue) nor the wait for a grader counts: 2 turns of 3 s are 6 s."""
    engine = TimedFakeEngine(10, script=lambda *_: [5, STOP], seconds_per_token=400.0)
    trajectory = play(engine, Waiting(show("7"), done(1.0)), seconds=seconds, runner=virtual_time.run)
    assert trajectory.end is end and len(trajectory.turns) == 2


class Meeting:
    def __init__(self, meeting: threading.Barrier):
        self.meeting = meeting

    def reset(self, prompt: Prompt) -> str:
        return "1 2"

    def step(self, action: str) -> StepResult:
        self.meeting.wait(20)  # until all are here
        return done(1.0)

    def close(self) -> None:
        pass


def test_sync_environments_do_not_block_each_other():
    meeting = threading.Barrier(4)

    def make(_: object) -> Meeting:
        return Meeting(meeting)

    async def run() -> list[Trajectory]:
        engine = FakeEngine(10, script=lambda *_: [5, STOP])
        runner = make_runner(engine, EpisodeLimits(1, 30.0))
        tasks = [EpisodeTask(PROMPT, i, make, Sampling(4), lambda turn: 0, f"t{i}") for i in range(4)]
        return await asyncio.gather(*map(runner.run, tasks))

    assert all(trajectory.score == Score(1.0) for trajectory in asyncio.run(run()))


def test_each_turn_has_the_version_that_sampled_it():
    """Weights change while the environment runs, and later during a turn."""
    engine = TimedFakeEngine(10, script=lambda *_: [5, 6, STOP], seconds_per_token=1.0)

    async def change_weights() -> None:
        for seconds, version in ((4.0, 1), (103.5, 2)):
            await asyncio.sleep(seconds)
            await engine.pause()
            await engine.confirm_weights(version)
            await engine.resume()

    def both(episode):
        async def play_both():
            changing = asyncio.create_task(change_weights())
            trajectory = await episode
            await changing
            return trajectory

        return virtual_time.run(play_both())

    trajectory = play(engine, Waiting(show("7"), done(1.0)), seconds=7.0, runner=both)
    assert [turn.completion.weight_versions for turn in trajectory.turns] == [[(0, 3)], [(1, 1), (2, 2)]]
    assert trajectory.rows[0].weight_versions == [(0, 3), (1, 1), (2, 2)]
