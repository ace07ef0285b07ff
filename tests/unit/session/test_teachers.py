"""Requests to teachers behind servers: values, retries and errors."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from alphaapollo.batching.batch import Columns
from alphaapollo.config.schema import Teacher
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.session import teachers
from alphaapollo.session.teachers import (
    TeacherServerError,
    TokenLogprob,
    score_rows,
    select_top_tokens,
)
from alphaapollo.types import Row
from tests.unit.session.teacher_server import Answer, make_completion, serve

TOP = {1: math.log(0.5), 2: math.log(0.25), 99: math.log(0.125)}
ROWS = [
    Row([3, 4, 5, 6], [0, 0, 1, 1], [0.0] * 4, [3], columns={TEACHER_SHARES: (0.25, 0.75)}),
    Row([3, 8], [0, 1], [0.0] * 2, [1], columns={TEACHER_SHARES: (1.0, 0.0)}),
]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.001)
    monkeypatch.setattr(teachers, "PATIENCE", 16.0)  # 6 retries


def score(answer: Any, rows: list[Row] = ROWS, **keys: Any) -> Columns[np.ndarray]:
    """Scores of two teachers: the first is on the ranks, the second behind a server that gives `answer`."""

    async def request() -> Columns[np.ndarray]:
        async with serve(answer) as url:
            models = {"local": {"path": "folder"}, "remote": {"base_url": url, "name": "big"}}
            return await score_rows(Teacher(models=models, by_source={"*": "local"}, **keys), rows, 50)

    return asyncio.run(request())


def test_log_probs_of_sampled_tokens_are_weighted_and_only_needed_rows_are_requested():
    requests = []

    def answer(path: str, request: dict[str, Any]) -> Answer:
        requests.append((path, request))
        return make_completion(request["prompt"], {})

    scores = score(answer, divergence="sampled")
    assert scores.target_logprobs is not None and scores.top_tokens is None
    np.testing.assert_allclose(scores.target_logprobs, [0.75 * -0.5, 0.75 * -0.6, 0.0], rtol=1e-6)
    own = {"model": "big", "prompt": [3, 4, 5, 6], "max_tokens": 1, "prompt_logprobs": 0}
    assert requests == [("/v1/completions", own)]


def test_top_tokens_and_the_rest_of_the_vocabulary():
    scores = score(lambda _, request: make_completion(request["prompt"], TOP), divergence="reverse", top_k=2)
    assert scores.top_tokens is not None and scores.top_token_logprobs is not None
    assert scores.top_tokens.tolist() == [[[5, 1]], [[6, 1]], [[0, 0]]]  # -0.5 and -0.6 exceed log 0.5
    expected = [-0.5, math.log(0.5), math.log(1e-7)]  # the probabilities sum to more than 1
    np.testing.assert_allclose(scores.top_token_logprobs[0, 0], expected, rtol=1e-6)


def test_tokens_that_the_policy_lacks_count_as_others():
    scores = {token: TokenLogprob(value) for token, value in TOP.items()}
    tokens, logprobs = select_top_tokens(scores, 3, vocabulary_size=50)
    assert tokens == [1, 2, 1]
    assert logprobs == pytest.approx([math.log(0.5), math.log(0.25), math.log(0.5), math.log(0.25)])


def test_failed_requests_are_sent_again():
    statuses = [503, 429, 500, 503, 502, 503, 200]  # as long as the server needs

    def answer(path: str, request: dict[str, Any]) -> Answer:
        status = statuses.pop(0)
        return make_completion(request["prompt"], {}) if status == 200 else status

    assert score(answer, ROWS[:1], divergence="sampled").target_logprobs is not None
    assert not statuses


@pytest.mark.parametrize(
    ("answer", "facts"),
    [
        (503, r"503.* teacher.models.remote.timeout=120"),
        (404, r"NotFoundError.*404"),
        ({"choices": [{"text": "a"}]}, "no prompt_logprobs"),
        (make_completion([1, 2], {}), "log-prob of each token"),
    ],
)
def test_a_teacher_that_fails_stops_the_run(answer: Answer, facts: str):
    with pytest.raises(TeacherServerError, match=rf"teacher.models.remote.base_url=http.*{facts}"):
        score(lambda *_: answer, divergence="sampled")


def test_a_server_that_is_not_reachable_stops_the_run():
    teacher = Teacher(divergence="sampled", model={"base_url": "http://127.0.0.1:9/v1", "name": "big"})
    with pytest.raises(TeacherServerError, match="APIConnectionError"):
        asyncio.run(score_rows(teacher, [Row([3, 8], [0, 1], [0.0] * 2, [1])], 50))
