"""Time limits of episodes, sync environments and weights that change."""

import asyncio
import threading

import pytest

from alphaapollo.engines.fake import FakeEngine
from alphaapollo.environments.base import StepResult
from alphaapollo.processes.time_limit import exclude_from_time_limit
from alphaapollo.types import EpisodeEnd, Score
from scripts.simulation.timed_engine import TimedFakeEngine
from tests.processes import run_python
from tests.unit import virtual_time
from tests.unit.rollout.episode_kit import STOP, Environment, done, play, play_group, show
from tests.unit.rollout.test_episode import Sync


class Waiting(Environment):
    """Takes 3 s per turn, plus 100 s of waiting in a queue. close() hangs."""

    async def step(self, action: str) -> object:
        await asyncio.sleep(3)
        with exclude_from_time_limit():
            await asyncio.sleep(100)
        return await super().step(action)

    async def close(self) -> None:
        await asyncio.sleep(1e6)


@pytest.mark.parametrize(
    ("seconds", "attempts", "end"),
    [
        (7.0, [[show("7"), done(1.0)]], EpisodeEnd.DONE),
        (5.0, [[show("7"), done(1.0)]], EpisodeEnd.TIME_LIMIT),
        (5.0, [[RuntimeError()], [done(1.0)]], EpisodeEnd.TIME_LIMIT),
    ],
)
def test_time_limit_counts_environment_time_only(seconds, attempts, end):
    """Neither the engine (with its own queue) nor the wait for a grader counts: 2 turns of 3 s are 6 s, also in two
    attempts."""
    engine = TimedFakeEngine(10, script=lambda *_: [5, STOP], seconds_per_token=400.0)
    environments = [Waiting(*replies) for replies in attempts]
    trajectory, _ = play(engine, *environments, seconds=seconds, run=virtual_time.run)
    assert trajectory.end is end and len(trajectory.turns) == len(attempts[0])


def test_sync_environments_do_not_block_each_other():
    meeting = threading.Barrier(4)

    class Meeting(Sync):
        def step(self, action: str) -> StepResult:
            meeting.wait(20)  # until all are here
            return done(1.0)

    group = play_group(FakeEngine(10, script=lambda *_: [5, STOP]), lambda _: Meeting(KeyError()))
    assert [trajectory.score for trajectory in group.trajectories] == [Score(1.0)] * 4


def test_each_turn_has_the_version_that_sampled_it():
    """Weights change while the environment runs, and later during a turn."""
    engine = TimedFakeEngine(10, script=lambda *_: [5, 6, STOP], seconds_per_token=1.0)

    async def change_weights() -> None:
        for seconds, version in ((4.0, 1), (103.5, 2)):
            await asyncio.sleep(seconds)
            await engine.pause()
            await engine.confirm_weights(version)
            await engine.resume()

    async def run(episode):
        return (await asyncio.gather(episode, change_weights()))[0]

    waiting = Waiting(show("7"), done(1.0))
    trajectory, _ = play(engine, waiting, seconds=7.0, run=lambda episode: virtual_time.run(run(episode)))
    assert [turn.completion.weight_versions for turn in trajectory.turns] == [[(0, 3)], [(1, 1), (2, 2)]]
    assert trajectory.rows[0].weight_versions == [(0, 3), (1, 1), (2, 2)]


HANGING = """
import asyncio, time
from alphaapollo.rollout.episode import EnvironmentCaller
from alphaapollo.processes.time_limit import TimeLimit

class Game:
    def reset(self, prompt):
        time.sleep(3600 if prompt == "hang" else 0)
        return prompt + "!"

async def run():
    caller = EnvironmentCaller(max_threads=2)

    def call(prompt):
        return asyncio.create_task(caller.call(TimeLimit(60.0), Game(), "reset", prompt))

    hanging = [call("hang") for _ in range(4)]
    await asyncio.wait(hanging, timeout=0.1)
    for task in hanging:
        task.cancel()
    print(await asyncio.gather(*map(call, "ab")))

asyncio.run(run())
"""


def test_hanging_call_blocks_neither_other_calls_nor_the_exit():
    """Two at a time: four calls hang and are given up; then two others have their turns, and the process ends."""
    done = run_python("-c", HANGING)
    assert done.stdout == "['a!', 'b!']\n" and done.returncode == 0, done.stderr
