"""A judge behind a small HTTP server with scripted replies."""

import asyncio
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from alphaapollo.config.schema import CustomRewardFunction, Judge, Reward
from alphaapollo.rewards import judge
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.judge import fill_template, make_judge_function, read_verdict
from alphaapollo.rewards.registry import check_prompts_are_gradable
from alphaapollo.types import Outcome, Prompt, Score

pytest.importorskip("openai", reason="the judge's client is an optional package")
pytestmark = pytest.mark.timeout(90)

PROMPT = Prompt(id=0, data_source="judge", content=[{"role": "user", "content": "2+2?"}], ground_truth="4")


@pytest.fixture
def server(monkeypatch):
    """Server that sends `replies` (a text, a status, or a complete body) in turn and repeats the last one. `requests`
    are recorded."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    replies, requests = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
            status, body = (reply, {"error": {"message": "slow down"}}) if isinstance(reply, int) else (200, None)
            said = None if isinstance(reply, bytes) else reply
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
            data = json.dumps(body or {"id": "1", "object": "chat.completion", "choices": [choice]}).encode()
            data = reply if isinstance(reply, bytes) else data
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("retry-after-ms", "10")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    http.replies, http.requests = replies, requests
    http.url = f"http://127.0.0.1:{http.server_port}/v1"
    yield http
    http.shutdown()
    http.server_close()


def judged(server, *replies, text="<think>SCORE: 1</think>It is 4.", **settings):
    server.replies[:] = replies
    return make_judge_function(Judge(model="m", base_url=server.url, **settings))(PROMPT, text)


def test_request_has_question_truth_and_answer(server):
    assert judged(server, "The answer is right.\nSCORE: 0.75") == Score(0.75, {"accuracy": 1.0})
    (request,) = server.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.0, 1024)
    content = request["messages"][0]["content"]
    for part in ("<question>\n2+2?\n", "<reference>\n4\n", "<answer>\nIt is 4.\n"):
        assert part in content


@pytest.mark.parametrize("status", [429, 500, 503])
def test_refused_requests_are_retried(server, status):
    assert judged(server, status, status, "SCORE: 1") == Score(1.0, {"accuracy": 1.0})
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "body", [b"<html>", b'"text"', b"[]", b'{"choices": []}', b'{"choices": [{}]}', b'{"error": "x"}']
)
def test_incompatible_server_is_a_failure(server, body):
    score = judged(server, body)
    assert score.outcome is Outcome.GRADER_FAILED
    assert score.reason.startswith("the judge's server is not OpenAI-compatible: ")


def test_permanent_refusal_is_a_failure(server):
    score = judged(server, 429)
    assert len(server.requests) == 1 + judge.MAX_RETRIES
    assert score.outcome is Outcome.GRADER_FAILED and math.isnan(score.reward)
    assert "the judge gave no answer: RateLimitError" in score.reason and "slow down" in score.reason


def test_bad_request_is_not_retried(server):
    assert "BadRequestError" in judged(server, 400).reason
    assert len(server.requests) == 1


def test_unreachable_server_is_a_failure(monkeypatch):
    monkeypatch.setattr(judge, "MAX_RETRIES", 0)
    grade = make_judge_function(Judge(model="m", base_url="http://127.0.0.1:9/v1"))
    assert "the judge gave no answer: APIConnectionError" in grade(PROMPT, "4").reason


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("SCORE: 1", 1.0),
        ("score = .5", 0.5),
        ("**SCORE: 0.0**", 0.0),
        ("SCORE: 0\nNo, wait.\nSCORE: 1.", 1.0),
        ("<think>SCORE: 0</think>\nSCORE: 1", 1.0),
    ],
)
def test_verdicts(reply, score):
    assert read_verdict(reply) == Score(score, {"accuracy": float(score >= 0.5)})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (None, "has no line 'SCORE: ...': ''"),
        ("", "has no line"),
        ("It is right, I think.", "has no line 'SCORE: ...': 'It is right, I think.'"),
        ("SCORE: high", "has no line"),
        ("SCORE: 1 or SCORE: 0", "has no line"),
        ("SCORE: 7", "the judge's score 7 is not between 0 and 1"),
        ("SCORE: -1", "the judge's score -1 is not between"),
        ("<think>SCORE: 1</think>", "has no line"),
    ],
)
def test_reply_without_verdict_is_a_failure(reply, reason):
    score = read_verdict(reply)
    assert score.outcome is Outcome.GRADER_FAILED and math.isnan(score.reward)
    assert reason in score.reason


def test_placeholders_in_an_answer_stay():
    template = "Q {question} T {ground_truth} A {answer} {other}"
    prompt = Prompt(id=0, data_source="judge", content="{answer}?")
    assert fill_template(template, prompt, "{ground_truth}") == "Q {answer}? T none is given A {ground_truth} {other}"


def test_missing_settings_are_named(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"reward\.judge\.model is empty"):
        make_judge_function(Judge())
    with pytest.raises(ValueError, match="environment variable OPENAI_API_KEY"):
        make_judge_function(Judge(model="m"))
    rows = [Prompt(id=0, data_source="gsm8k", content="?", ground_truth="4")]
    check_prompts_are_gradable(rows, Reward())
    rows.append(Prompt(id=1, data_source="judge/a", content="?"))  # needs no ground truth
    with pytest.raises(ValueError, match=r"'judge/a' is graded by a judge, but reward\.judge\.model is empty"):
        check_prompts_are_gradable(rows, Reward())
    with pytest.raises(ValueError, match=r"reward\.timeout=10 must exceed reward\.judge\.timeout=60"):
        check_prompts_are_gradable(rows, Reward(judge=Judge(model="m")))
    check_prompts_are_gradable(rows, Reward(timeout=180, judge=Judge(model="m")))


def test_in_grader_processes(server):
    server.replies[:] = ["nonsense", "SCORE: 1"]

    reward = Reward(timeout=20.0, components={"format": 0.1}, judge=Judge(model="m", base_url=server.url))

    async def main():
        client = RewardClient(reward, CustomRewardFunction())
        await client.start()
        try:
            return await client.score(PROMPT, r"<think>x</think>\boxed{4}")
        finally:
            await client.close()

    score = asyncio.run(main())  # nonsense is tried once more
    assert (score.reward, score.components) == (1.1, {"accuracy": 1.0, "task": 1.0, "format": 1.0})
