"""Reward functions of other frameworks in grader processes: async calls, faults, reward servers."""

import asyncio
import http.server
import json
import threading

import pytest

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.types import Outcome, Score
from tests.builders import make_completion, make_turn
from tests.unit.rewards.test_contracts import PROMPT


def grade(tmp_path, source, texts, timeout=30.0, turns=(), **fields):
    """Grade texts at the same time in a grader process."""
    path = tmp_path / "reward.py"
    path.write_text(source)

    async def main():
        client = RewardClient(Reward(timeout=timeout), CustomRewardFunction(path=str(path), **fields))
        await client.start()
        try:
            return await asyncio.gather(*(client.score(PROMPT, text, turns) for text in texts))
        finally:
            await client.close()

    return asyncio.run(main())


MEETING = '''
import asyncio
waiting, enough = [], asyncio.Event()
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return once 20 calls run at the same time."""
    waiting.append(solution_str)
    if len(waiting) == 20:
        enough.set()
    await enough.wait()
    return float(solution_str)
'''


def test_calls_of_an_async_function_overlap(tmp_path):
    scores = grade(tmp_path, MEETING, map(str, range(20)))
    assert [score.reward for score in scores] == [*range(20)]


def test_functions_that_are_async_are_awaited_together(tmp_path):
    source = """
import asyncio
met = asyncio.Event()
async def first(completions, **kwargs):
    await met.wait()
    return [1.0]
async def second(completions, **kwargs):
    met.set()
    return [2.0]
"""
    assert grade(tmp_path, source, ["x"], name=["first", "second"])[0].reward == 3.0


FAULTS = """
import asyncio, os, time
async def compute_score(prompt, completion):
    if completion == "hang":
        await asyncio.Event().wait()
    if completion == "block":
        time.sleep(1000)
    if completion == "die":
        os._exit(3)
    if completion == "raise":
        raise KeyError("k")
    return float(completion)
"""


@pytest.mark.parametrize(("fault", "what"), [("hang", "within 0.5 s"), ("raise", "KeyError: 'k'")])
def test_faults_of_an_async_function_concern_one_completion(tmp_path, fault, what):
    failed, right = grade(tmp_path, FAULTS, [fault, "1"], timeout=0.5)
    assert failed.outcome is Outcome.GRADER_FAILED and what in failed.reason and right == Score(1.0)


@pytest.mark.parametrize(("fault", "what"), [("block", "within 0.5 s"), ("die", "exit code 3")])
def test_a_process_that_is_blocked_or_dies_is_replaced(tmp_path, fault, what):
    path = tmp_path / "reward.py"
    path.write_text(FAULTS)

    async def main():
        client = RewardClient(Reward(timeout=0.5), CustomRewardFunction(path=str(path)))
        await client.start()
        try:
            return [await client.score(PROMPT, text) for text in (fault, "1")]
        finally:
            await client.close()

    failed, right = asyncio.run(main())
    assert failed.outcome is Outcome.GRADER_FAILED and what in failed.reason and right == Score(1.0)


def test_tokens_and_steps_arrive_in_the_grader_process(tmp_path):
    source = """
def compute_score(completion_ids, trainer_state, **kwargs):
    return [100 * trainer_state.global_step + sum(completion_ids[0])]
"""
    turn = make_turn(make_completion([3, 4], version=2))
    assert grade(tmp_path, source, ["x"], turns=[turn])[0].reward == 207.0


def test_a_reward_server(tmp_path):
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"rewards": [0.5], "scores": [1.0], "extra_logs": {"a": [2.0]}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    custom = CustomRewardFunction(path=f"http://127.0.0.1:{server.server_port}/get_reward")

    async def main():
        client = RewardClient(Reward(timeout=30), custom)
        await client.start()
        try:
            return await client.score(PROMPT, "4")
        finally:
            await client.close()

    assert asyncio.run(main()) == Score(0.5, {"accuracy": 1.0, "a": 2.0})
    assert asked == [{"query": ["?4"], "prompts": ["?"], "labels": ["4"]}]
    server.shutdown()


def test_a_metric_that_the_algorithm_needs_must_be_finite(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(prompt, completion):\n    return {'reward': 1.0, 'format': float('nan')}")

    async def main(needed):
        client = RewardClient(Reward(), CustomRewardFunction(path=str(path)))
        client.fails_incomplete = needed
        await client.start()
        try:
            return await client.score(PROMPT, "4")
        finally:
            await client.close()

    assert asyncio.run(main(False)).skipped_components == ("format",)
    failed = asyncio.run(main(True))
    assert failed.outcome is Outcome.GRADER_FAILED and "format" in failed.reason
