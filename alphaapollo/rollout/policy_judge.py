"""The policy as its own judge (reward.judge.backend=policy): judgements are sampled by the rollout worker's engine."""

from __future__ import annotations

import itertools
import zlib

from alphaapollo.config.schema import Judge
from alphaapollo.data.rendering import Renderer
from alphaapollo.engines.protocol import Engine
from alphaapollo.observability.spans import SPANS
from alphaapollo.rewards.judges.client import CompleteMessage
from alphaapollo.types import Sampling


def make_policy_judge(engine: Engine, renderer: Renderer, judge: Judge) -> CompleteMessage:
    """Return a function that samples the reply to a user message. Its seed depends only on the message.

    The function raises ValueError if message and reply do not fit into the engine's context. It has no time limit:
    judgements wait in the same queue as episodes, whose generation has none either.
    """
    numbers = itertools.count()

    async def complete(content: str) -> str:
        token_ids = renderer.encode_prompt([{"role": "user", "content": content}])
        seed = zlib.crc32(content.encode())
        sampling = Sampling(judge.max_tokens, judge.temperature, seed=seed, stop_token_ids=renderer.eos_token_ids)
        with SPANS("judge"):
            completion = await engine.generate(token_ids, sampling, f"judge.{next(numbers)}")
        return renderer.decode(completion.token_ids)

    return complete
