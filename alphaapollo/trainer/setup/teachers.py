"""Check the teachers of a training run against its prompts and the policy's tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from alphaapollo.config.schema import Config, TeacherModel
from alphaapollo.data.rendering import Renderer
from alphaapollo.launch.policy import OTHER_TOKENIZER
from alphaapollo.rollout.self_teacher import check_demonstrations
from alphaapollo.session.teachers import TeacherClient
from alphaapollo.types import Prompt

TOKENS_PER_REQUEST = 1000  # token ids that a server decodes per request
RETRY_SECONDS = 15.0  # time for which a failed request is retried


def check_teachers(config: Config, renderer: Renderer, prompts: Sequence[Prompt]) -> list[str]:
    """Check that each training prompt has a teacher, and that the servers of teachers have the policy's tokenizer.

    Returns notices. Raises ValueError if a teacher cannot be used.
    """
    if config.teacher.self_teacher.context == "demonstration":
        check_demonstrations(prompts, config.teacher.self_teacher.demonstration_key)
    teacher, notices = config.teacher, []
    prompt_of_source = {prompt.data_source: prompt for prompt in prompts}
    shares_of_source = {source: teacher.find_shares(source) for source in prompt_of_source}
    if missing := [source for source, shares in shares_of_source.items() if not any(shares)]:
        raise ValueError(
            f"no teacher for the data_source {missing[0]!r} of row {prompt_of_source[missing[0]].id}. Add a pattern to "
            "teacher.by_source, e.g. *, which matches all."
        )
    for index, key in enumerate(teacher.models_by_key):
        if not any(shares[index] for shares in shares_of_source.values()):
            notices.append(f"{key} is not used: teacher.by_source assigns no training prompt to it.")
    if teacher.servers and any(_has_images(prompt) for prompt in prompts):
        key = next(iter(teacher.servers))
        raise ValueError(f"{key}.base_url: teachers behind servers do not support images. Set {key}.path instead.")
    for key, model in teacher.servers.items():
        asyncio.run(_check_server(key, model, teacher.top_k or 0, renderer, config.data.max_length))
    return notices


def _has_images(prompt: Prompt) -> bool:
    return not isinstance(prompt.content, str) and any(message.get("images") for message in prompt.content)


async def _check_server(key: str, model: TeacherModel, top_k: int, renderer: Renderer, max_length: int) -> None:
    """Compare the server's decoding of every token id with the policy's tokenizer, then request the log-probs of a
    sequence of maximum length. Raises ValueError or TeacherServerError."""
    tokenizer, client = renderer.tokenizer, TeacherClient(key, model, RETRY_SECONDS)
    url = model.base_url.rstrip("/").removesuffix("/v1") + "/detokenize"

    try:
        for start in range(0, len(tokenizer), TOKENS_PER_REQUEST):
            ids = [*range(start, min(start + TOKENS_PER_REQUEST, len(tokenizer)))]
            reply = json.loads(await client.post(url, {"model": model.name, "tokens": ids}))
            if reply["prompt"] != tokenizer.decode(ids):
                raise ValueError(
                    f"{key}.base_url={model.base_url}: the server has another tokenizer than the policy: it decodes "
                    f"tokens {ids[0]} to {ids[-1]} differently. {OTHER_TOKENIZER}"
                )
        await client.score([number % len(tokenizer) for number in range(max_length)], top_k)
    finally:
        await client.close()
