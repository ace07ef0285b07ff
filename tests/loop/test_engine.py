"""Engines behind the protocol: sampling, log-probs, and independence of the batch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from alphaapollo.types import Sampling, StopReason
from tests.loop.engine_kit import (
    ENGINES_AT_NIGHT,
    PROBE,
    Session,
    logprobs_of,
    make_model,
    mean_abs_difference,
    start_engine,
)

# Products of depth 3072 are where oneDNN's single float32 row differs from the same row among others.
MODEL = make_model("Qwen3", seed=0, intermediate_size=3072)
PROMPT = list(range(7, 30))


ONLY_VLLM = pytest.mark.parametrize("session", ["vllm"], indirect=True)


@pytest.fixture(scope="module", params=ENGINES_AT_NIGHT)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with start_engine(MODEL, tmp_path_factory.mktemp("engine"), name=request.param) as started:
        yield started


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(24, temperature=0.0),
        Sampling(24, seed=1),
        Sampling(24, temperature=0.6, seed=2),
        Sampling(24, temperature=1.5, top_p=0.7, seed=3),
        Sampling(24, temperature=0.8, top_k=5, seed=4),
        Sampling(24, temperature=0.8, top_p=0.9, top_k=20, seed=5),
    ],
)
def test_logprobs_are_after_temperature_and_before_truncation(session: Session, sampling: Sampling) -> None:
    (answer,) = session.generate((PROMPT, sampling))
    assert len(answer.token_ids) == 24 and answer.stop_reason is StopReason.LENGTH and answer.weight_version == 0
    expected = logprobs_of(MODEL, PROMPT + answer.token_ids, sampling.temperature or 1.0)[len(PROMPT) - 1 :]
    assert mean_abs_difference(answer.logprobs, expected) < 1e-5


def test_truncation_excludes_tokens(session: Session) -> None:
    answers = session.generate(*((PROMPT, Sampling(1, top_k=2, seed=seed)) for seed in range(64)))
    assert len({answer.token_ids[0] for answer in answers}) == 2


def test_stop_token_is_part_of_the_completion(session: Session) -> None:
    (long,) = session.generate((PROMPT, Sampling(24, seed=1)))
    stop = long.token_ids[5]
    (answer,) = session.generate((PROMPT, Sampling(24, seed=1, stop_token_ids=(stop,))))
    length = long.token_ids.index(stop) + 1
    assert answer.token_ids == long.token_ids[:length] and answer.stop_reason is StopReason.STOP
    assert answer.logprobs == long.logprobs[:length]


def test_score_equals_model_logprobs(session: Session) -> None:
    assert mean_abs_difference(session.run(session.engine.log_probs(PROBE)), logprobs_of(MODEL, PROBE)) < 1e-5


def test_samples_share_prompt_prefill(session: Session) -> None:
    prompt = [random.Random(0).randrange(272) for _ in range(110)]
    first = session.generate((prompt, Sampling(4, seed=0))) if session.name != "vllm" else []  # else one step has all
    answers = first + session.generate(*((prompt, Sampling(4, seed=seed)) for seed in range(len(first), 16)))
    hits = [answer.num_cached_tokens for answer in answers]
    shared = 96 if session.name == "vllm" else 109  # whole blocks of 32, or tokens
    assert sum(hit == shared for hit in hits) >= 15, hits  # only the first computes them


def test_tokens_do_not_depend_on_the_batch(session: Session) -> None:
    """With equal seeds; log-probs may round differently."""
    together = session.generate(*((PROMPT, Sampling(16, seed=seed)) for seed in range(12)))
    alone = [session.generate((PROMPT, Sampling(16, seed=seed)))[0] for seed in (3, 7)]
    assert [one.token_ids for one in alone] == [together[seed].token_ids for seed in (3, 7)]
    assert len({tuple(one.token_ids) for one in together}) == 12


@ONLY_VLLM
def test_result_does_not_depend_on_the_batch(session: Session) -> None:
    draws = random.Random(1)
    requests = [
        ([draws.randrange(272) for _ in range(draws.randint(1, 60))], Sampling(draws.randint(1, 30), seed=seed))
        for seed in range(24)
    ]

    def answers(order: list[int]) -> dict[int, tuple[list[int], list[float]]]:
        session.run(session.engine._running_llm.reset_prefix_cache())
        done = session.generate(*(requests[i] for i in order))
        return {i: (answer.token_ids, answer.logprobs) for i, answer in zip(order, done, strict=True)}

    together = answers(list(range(24)))
    backwards = answers(list(range(24))[::-1])
    alone = {i: answers([i])[i] for i in range(6)}
    assert backwards == together  # bit for bit
    assert alone == {i: together[i] for i in alone}


def test_too_long_request_is_an_error(session: Session) -> None:
    with pytest.raises(ValueError, match="256"):
        session.generate((PROMPT, Sampling(256 - len(PROMPT) + 1)))
    assert session.generate((PROMPT, Sampling(2)))  # the engine still works


def test_cancelled_requests_end(session: Session) -> None:
    """Before and after they start. Otherwise the weights could not be confirmed, because requests would run."""

    async def give_up(is_running: bool) -> None:
        calls = [asyncio.ensure_future(session.engine.generate(PROMPT, Sampling(200), f"r{n}")) for n in range(64)]
        await (session.engine.generate(PROMPT, Sampling(2), "first") if is_running else asyncio.sleep(0))
        for call in calls:
            call.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(end, asyncio.CancelledError) for end in ends)
        await session.engine.generate(PROMPT, Sampling(2), "next")
        await session.engine.confirm_weights(0)

    session.run(give_up(is_running=False))
    session.run(give_up(is_running=True))
