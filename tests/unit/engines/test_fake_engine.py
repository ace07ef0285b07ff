import asyncio

from alphaapollo.engines.fake import FakeEngine
from alphaapollo.types import Sampling, StopReason


def generate(engine: FakeEngine, token_ids: list[int], sampling: Sampling):
    return asyncio.run(engine.generate(token_ids, sampling, "r"))


def test_answers_depend_on_context_and_seed():
    engine = FakeEngine(50, min_tokens=3, max_tokens=9)
    first = generate(engine, [1, 2], Sampling(20, seed=1, stop_token_ids=(99,)))
    assert first == generate(engine, [1, 2], Sampling(20, seed=1, stop_token_ids=(99,)))
    assert first.token_ids != generate(engine, [1, 2], Sampling(20, seed=2, stop_token_ids=(99,))).token_ids
    assert 3 <= len(first.token_ids) <= 9 and max(first.token_ids[:-1]) < 50
    assert first.token_ids[-1] == 99 and first.stop_reason is StopReason.STOP
    assert len(first.logprobs) == len(first.token_ids)
    cut = generate(FakeEngine(50, min_tokens=5, max_tokens=5), [1], Sampling(2, stop_token_ids=(99,)))
    assert len(cut.token_ids) == 2 and cut.stop_reason is StopReason.LENGTH
