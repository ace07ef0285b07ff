"""Weight updates while an engine generates: the version of each token, and the KV cache afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.types import Completion, Sampling
from tests.loop.engine_kit import ENGINES_AT_NIGHT, PROBE, Session, logprobs_of, make_model, start_engine


@pytest.mark.parametrize("name", ENGINES_AT_NIGHT)
def test_every_token_has_the_version_that_sampled_it(tmp_path: Path, name: str) -> None:
    """Two answers over three versions. The cache is recomputed, so each token is what its weights alone give."""
    length = choose_length(name)
    models = [make_model("Qwen3", seed, eos_token_id=None) for seed in (0, 1, 2)]
    with start_engine(models[0], tmp_path, name=name, max_model_len=length + 56) as session:
        for first in range(1, 30, 3):  # on a busy machine, the engine may finish requests before it is paused
            with session.sent(models[0], first) as update:
                session.publish(update)
            answers = session.run(completions_in_flight(session, models, first))
            if all(len(answer.weight_versions) == 3 for answer in answers):
                break
        assert session.gap(models[2]) < 1e-5
        (fresh,) = session.generate((PROBE, Sampling(4, seed=9)))
        assert fresh.weight_versions == [(first + 2, 4)]  # and nothing of the old weights' cache
        assert fresh.logprobs == pytest.approx(logprobs_of(models[2], PROBE + fresh.token_ids)[-4:], abs=1e-4)
    for answer in answers:
        versions = [version for version, count in answer.weight_versions for _ in range(count)]
        assert len(versions) == length and versions == sorted(versions)
        assert set(versions) == {first, first + 1, first + 2}
        by_version = [logprobs_of(model, PROBE + answer.token_ids)[-length:] for model in models]
        own = [by_version[version - first][place] for place, version in enumerate(versions)]
        assert answer.logprobs == pytest.approx(own, abs=1e-4)


def choose_length(name: str) -> int:
    """Tokens of an answer: SGLang reports its progress every 50 tokens."""
    return 200 if name == "vllm" else 1200


async def completions_in_flight(session: Session, models: list[Any], first: int) -> list[Completion]:
    """Answers of two requests during which the engine receives two updates, after version `first`."""
    engine, length = session.engine, choose_length(session.name)
    before = engine.get_progress_counter() if session.name != "vllm" else 0
    calls = [
        asyncio.ensure_future(engine.generate(PROBE, Sampling(length, seed=seed), f"r{seed}")) for seed in range(2)
    ]
    for number, model in enumerate(models[1:], start=1):
        while not any(call.done() for call in calls):
            if engine.get_progress_counter() - before >= length // 4 * number:
                break
            await asyncio.sleep(0)
        await engine.pause()
        with session.sent(model, first + number) as update:
            await session.receive(update)
            receipt = await engine.confirm_weights(update.version)
            assert (receipt.version, receipt.digest) == (update.version, update.digest)
        await engine.resume()
    return list(await asyncio.gather(*calls))
