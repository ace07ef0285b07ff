"""Reward functions of other frameworks in grader processes: async calls, faults, reward servers."""

import http.server
import json
import threading

import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.types import Outcome, Score
from tests.builders import make_completion, make_turn
from tests.unit.rewards.grading import open_graders
from tests.unit.rewards.test_contracts import PROMPT


@pytest.fixture
def grade(tmp_path):
    """Function that grades texts at the same time in a new grader process."""

    def grade(source, texts, timeout=30.0, name="compute_score", **turns):
        (tmp_path / "reward.py").write_text(source)
        with open_graders(Reward(timeout=timeout), tmp_path / "reward.py", name) as graders:
            return graders.score(PROMPT, texts, **turns)

    return grade


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
TOGETHER = """
import asyncio
met = asyncio.Event()
async def first(completions, **kwargs):
    await met.wait()
    return [1.0]
async def second(completions, **kwargs):
    met.set()
    return [2.0]
"""
STEPS = """
def compute_score(completion_ids, trainer_state, **kwargs):
    return [100 * trainer_state.global_step + sum(completion_ids[0])]
"""


def test_calls_of_an_async_function_overlap(grade):
    assert [score.reward for score in grade(MEETING, map(str, range(20)))] == [*range(20)]


def test_functions_that_are_async_are_awaited_together(grade):
    assert grade(TOGETHER, ["x"], name=["first", "second"])[0].reward == 3.0


def test_tokens_and_steps_arrive_in_the_grader_process(grade):
    turn = make_turn(make_completion([3, 4], version=2))
    assert grade(STEPS, ["x"], turns=[turn])[0].reward == 207.0


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


def test_faults_of_an_async_function_concern_one_completion(tmp_path):
    """A process that is blocked or dies is replaced."""
    (tmp_path / "reward.py").write_text(FAULTS)
    with open_graders(Reward(timeout=0.5), tmp_path / "reward.py", "compute_score") as graders:
        hung, raised, right = graders.score(PROMPT, ["hang", "raise", "1"])
        (blocked,), (after_block,), (died,), (after_end,) = (
            graders.score(PROMPT, [text]) for text in ("block", "1", "die", "1")
        )
    assert right == after_block == after_end == Score(1.0)
    faults = ((hung, "within 0.5 s"), (raised, "KeyError: 'k'"), (blocked, "within 0.5 s"), (died, "exit code 3"))
    for failed, what in faults:
        assert failed.outcome is Outcome.GRADER_FAILED and what in failed.reason


def test_a_reward_server():
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
    with open_graders(Reward(timeout=30), f"http://127.0.0.1:{server.server_port}/get_reward") as graders:
        assert graders.score(PROMPT, ["4"]) == [Score(0.5, {"accuracy": 1.0, "a": 2.0})]
    assert asked == [{"query": ["?4"], "prompts": ["?"], "labels": ["4"]}]
    server.shutdown()


def test_a_metric_that_the_algorithm_needs_must_be_finite(tmp_path):
    source = "def compute_score(prompt, completion):\n    return {'reward': 1.0, 'format': float('nan')}"
    (tmp_path / "reward.py").write_text(source)
    with open_graders(path=tmp_path / "reward.py", name="compute_score") as graders:
        (incomplete,) = graders.score(PROMPT, ["4"])
        graders.client.fails_incomplete = True
        (failed,) = graders.score(PROMPT, ["4"])
    assert incomplete.skipped_components == ("format",)
    assert failed.outcome is Outcome.GRADER_FAILED and "format" in failed.reason
