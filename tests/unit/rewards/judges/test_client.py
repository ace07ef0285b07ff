"""The judge's client against a mock HTTP server: concurrency, cache, retries, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from alphaapollo.config.schema import Judge
from alphaapollo.rewards import judges as judge_client
from alphaapollo.rewards.judges import JudgeClient, JudgeError, JudgeServer, read_score, wait_for_all
from alphaapollo.types import JudgeUsage
from tests.mock_judge import MockJudge
from tests.unit.rewards.judges.conftest import Start


def use(server: MockJudge, call: Callable[[JudgeClient], Awaitable[Any]], **settings: Any) -> Any:
    """Call a function with a client of the server, then close the client."""

    async def main() -> Any:
        judge = Judge(model="m", base_url=server.url, **settings)
        model = JudgeServer(judge)
        client = JudgeClient(judge, model.complete)
        try:
            return await call(client)
        finally:
            await client.close()
            await model.close()

    return asyncio.run(main())


def ask_all(*contents: str) -> Callable[[JudgeClient], Awaitable[Any]]:
    return lambda client: asyncio.gather(*(client.ask(content, read_score) for content in contents))


def ask(server: MockJudge, content: str = "2+2?", **settings: Any) -> float:
    ((value, _),) = use(server, ask_all(content), **settings)
    return float(value)


def test_requests_are_in_flight_at_once_up_to_the_limit(start: Start) -> None:
    server = start("SCORE: 1", barrier=8)  # answers nothing before 8 requests have arrived
    use(server, ask_all(*map(str, range(40))), max_connections=8)
    assert len(server.requests) == 40 and server.max_in_flight == 8


def test_a_request_has_model_message_and_sampling_parameters(start: Start) -> None:
    server = start("It is right.\nSCORE: 0.75")
    assert ask(server, temperature=0.5, max_tokens=7) == 0.75
    (request,) = server.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.5, 7)
    assert request["messages"] == [{"role": "user", "content": "2+2?"}]


def test_equal_requests_share_one_call_in_flight_and_later_the_cache(start: Start) -> None:
    server = start("SCORE: 1", barrier=2)

    async def call(client: JudgeClient) -> list[JudgeUsage]:
        usages = [usage for _, usage in await ask_all("a", "a", "b", "a")(client)]
        return [*usages, (await client.ask("b", read_score))[1]]

    usages = use(server, call)
    assert [usage.cached for usage in usages] == [0, 1, 0, 1, 1] and len(server.requests) == 2
    assert all(usage.judgements == 1 for usage in usages) and usages[0].seconds > 0


def test_a_verdict_in_flight_is_not_one_of_the_next_model(start: Start) -> None:
    server = start("SCORE: 0", "SCORE: 1", barrier=2)  # answers nothing before both requests have arrived

    async def call(client: JudgeClient) -> list[float]:
        before = asyncio.create_task(client.ask("a", read_score))
        await asyncio.sleep(0)  # the request is in flight
        client.clear_cache()
        await asyncio.gather(before, client.ask("a", read_score))
        return [(await client.ask("a", read_score))[1].cached]

    assert use(server, call) == [1] and len(server.requests) == 2


@pytest.mark.parametrize(
    ("size", "cached"),
    [
        (2, [0, 0, 1, 0, 1, 0]),  # c replaces b, the least recently used
        (0, [0, 0, 0, 0, 0, 0]),
        (3, [0, 0, 1, 0, 1, 1]),
    ],
)
def test_the_cache_drops_the_least_recently_used_verdict(start: Start, size: int, cached: list[int]) -> None:
    async def call(client: JudgeClient) -> list[int]:
        return [(await client.ask(content, read_score))[1].cached for content in "abacab"]

    server = start("SCORE: 1")
    assert use(server, call, cache_size=size) == cached and len(server.requests) == cached.count(0)


def test_without_a_cache_equal_requests_in_flight_are_judged_each(start: Start) -> None:
    values = use(start("SCORE: 0", "SCORE: 1"), ask_all("a", "a", "a"), cache_size=0, max_connections=1)
    assert [value for value, _ in values] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_refused_requests_are_retried(start: Start, status: int) -> None:
    server = start(status, status, "SCORE: 1")
    assert ask(server) == 1.0 and len(server.requests) == 3


BODIES = (b"<html>", b'"text"', b"[]", b'{"choices": []}', b'{"choices": [{}]}', b'{"error": "x"}')
FAILURES = [  # reply, error, requests
    (429, "RateLimitError.*slow down", 1 + judge_client.MAX_RETRIES),
    (400, "BadRequestError", 1),
    ("perhaps", r"'perhaps' \(in 2 replies\)", 2),
    *((body, "an OpenAI-compatible server: ", None) for body in BODIES),
]


@pytest.mark.parametrize(("reply", "error", "requests"), FAILURES)
def test_replies_that_stay_unusable_are_failures(start: Start, reply: Any, error: str, requests: int | None) -> None:
    server = start(reply)
    with pytest.raises(JudgeError, match=error):
        ask(server)
    assert requests in (None, len(server.requests))


def test_failures_are_shared_but_not_cached(start: Start) -> None:
    server = start(400, "SCORE: 1", latency=0.05)

    async def call(client: JudgeClient) -> float:
        both = await asyncio.gather(*(client.ask("a", read_score) for _ in range(2)), return_exceptions=True)
        assert [type(one) for one in both] == [JudgeError, JudgeError] and len(server.requests) == 1
        return (await client.ask("a", read_score))[0]

    assert use(server, call) == 1.0


def test_a_judgement_has_a_total_time_limit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "DEADLINE", 1)  # as long as one request: the retries exceed it
    with pytest.raises(JudgeError, match=r"within 0\.2 s"):
        ask(start("SCORE: 1", latency=30.0), timeout=0.2)


def test_no_judgement_is_in_flight_after_the_failure_of_another(start: Start) -> None:
    server = start(lambda content: 400 if content == "a" else "SCORE: 1", slow="b")

    async def call(client: JudgeClient) -> None:
        with pytest.raises(JudgeError, match="BadRequestError"):
            await wait_for_all(client.ask(content, read_score) for content in "ab")
        assert (await client.ask("b", read_score))[1].cached == 1

    use(server, call)


def test_a_cancelled_caller_does_not_cancel_the_judgement_of_others(start: Start) -> None:
    server = start("SCORE: 1", latency=0.1)

    async def call(client: JudgeClient) -> float:
        first, second = (asyncio.create_task(client.ask("a", read_score)) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        return (await second)[0]

    assert use(server, call) == 1.0 and len(server.requests) == 1


def test_closing_ends_judgements_with_a_reason(start: Start) -> None:
    server = start("SCORE: 1", latency=30.0)

    async def call(client: JudgeClient) -> None:
        task = asyncio.create_task(client.ask("a", read_score))
        await asyncio.sleep(0.02)
        await client.close()
        with pytest.raises(JudgeError, match="the judge was closed"):
            await task

    use(server, call)


def test_missing_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"reward\.judge\.model is empty"):
        JudgeServer(Judge())
    with pytest.raises(ValueError, match="environment variable OPENAI_API_KEY"):
        JudgeServer(Judge(model="m"))
