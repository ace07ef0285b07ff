"""Check before a worker starts that the teachers of a run can read its prompts and the policy's token ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from alphaapollo.config.schema import Config, Model, Teacher, TeacherModel
from alphaapollo.data.images import reads_images
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.models.load import load_config
from alphaapollo.rollout.self_teacher import check_demonstrations
from alphaapollo.trainer.step.distillation import TeacherClient, TeacherServerError
from alphaapollo.types import Prompt

DECODED_TOKENS = 1000  # per request to a server
CHECK_PATIENCE = 15.0  # seconds for which a failed request is sent again
FIX = (
    "Use a teacher with the policy's tokenizer (e.g. a larger model of its family), or train on the teacher's texts "
    "(docs/sft.md)."
)


def check_teachers(config: Config, renderer: Renderer, prompts: Sequence[Prompt]) -> list[str]:
    """Check the teachers of the training prompts. Returns notices; raises ValueError if one cannot be used."""
    if config.teacher.uses_self_teacher:
        check_self_teacher(config, prompts)
    teacher, notices = config.teacher, []
    sources = {prompt.data_source: prompt for prompt in prompts}
    weights = {source: teacher.find_shares(source) for source in sources}
    if missing := [source for source, one in weights.items() if not any(one)]:
        raise ValueError(
            f"no teacher for the data_source {missing[0]!r} of row {sources[missing[0]].id}. Add a pattern to "
            "teacher.by_source, e.g. *, which matches all."
        )
    for index, key in enumerate(teacher.models_by_key):
        if not any(one[index] for one in weights.values()):
            notices.append(f"{key} is not used: teacher.by_source assigns no training prompt to it.")
    if teacher.servers and any(_has_images(prompt) for prompt in prompts):
        key = next(iter(teacher.servers))
        raise ValueError(f"{key}.base_url: teachers behind servers do not support images. Set {key}.path instead.")
    for key, model in teacher.local_models.items():
        notices += check_teacher_vocabulary(key, model, teacher, config.actor_rollout_ref.model, renderer)
    for key, model in teacher.servers.items():
        try:
            asyncio.run(_check_server(key, model, teacher.top_k or 0, renderer, config.data.max_length))
        except TeacherServerError as error:
            raise ValueError(str(error)) from None
    return notices


def check_self_teacher(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if the policy cannot read the self-teacher's prompts, or a prompt has no demonstration."""
    teacher, model, data = config.teacher.self_teacher, config.actor_rollout_ref.model, config.data
    model_config, key = load_config(model), "teacher.self_teacher"
    if reads_images(model_config):
        raise ValueError(
            f"{key}.context={teacher.context} does not support {model.path}, a vision-language model. Set "
            f"{key}.context=null and teacher.model.path, or choose a text model."
        )
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.max_teacher_length > limit:
        raise ValueError(
            f"the self-teacher reads up to {config.max_teacher_length} tokens, its prompt and data.max_response_length="
            f"{data.max_response_length}, more than the context length of {model.path}, {limit} tokens. Set "
            f"{key}.max_prompt_length to at most {limit - data.max_response_length}."
        )
    if teacher.context == "demonstration":
        check_demonstrations(prompts, teacher.demonstration_key)


def _has_images(prompt: Prompt) -> bool:
    return not isinstance(prompt.content, str) and any(message.get("images") for message in prompt.content)


async def _check_server(key: str, model: TeacherModel, k: int, renderer: Renderer, max_length: int) -> None:
    """Compare the server's decoding of every token id with the policy's tokenizer, then request the log-probs of a
    sequence of maximum length. Raises ValueError or TeacherServerError."""
    tokenizer, client = renderer.tokenizer, TeacherClient(key, model, CHECK_PATIENCE)
    url = model.base_url.rstrip("/").removesuffix("/v1") + "/detokenize"

    async def decodes_alike(ids: list[int]) -> bool:
        reply = json.loads(await client.post(url, {"model": model.name, "tokens": ids}))
        return bool(reply["prompt"] == tokenizer.decode(ids))

    try:
        for start in range(0, len(tokenizer), DECODED_TOKENS):
            ids = [*range(start, min(start + DECODED_TOKENS, len(tokenizer)))]
            if await decodes_alike(ids):
                continue
            while len(ids) > 1:
                half = ids[: len(ids) // 2]
                ids = ids[len(half) :] if await decodes_alike(half) else half
            raise ValueError(
                f"{key}.base_url={model.base_url}: the server has another tokenizer than the policy. It decodes token "
                f"{ids[0]} differently, which is {tokenizer.decode(ids)!r} for the policy. {FIX}"
            )
        await client.score([number % len(tokenizer) for number in range(max_length)], k)
    finally:
        await client.close()


def check_teacher_vocabulary(
    key: str, model: TeacherModel, teacher: Teacher, policy: Model, policy_renderer: Renderer
) -> list[str]:
    """Check that a teacher on the ranks can read the policy's token ids. Returns notices; raises ValueError if not.

    Each token id must mean the same token in both models. To compare full distributions (all values of
    teacher.divergence except `sampled`), the teacher must also have no extra tokens, and at least as many logits.
    """
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    known, written = tokenizer.get_vocab(), policy_renderer.tokenizer.get_vocab()
    path = f"{key}.path={model.path}"
    if other := [token for token, number in written.items() if known.get(token) != number]:
        raise ValueError(
            f"{path} lacks these tokens of the policy, or has them with another id: {_format_tokens(other)}. {FIX}"
        )
    if teacher.uses_full_vocabulary:
        cause = f"teacher.divergence={teacher.divergence} compares full distributions"
        fix = "Set teacher.divergence=sampled, which needs only the policy's tokens, or use another teacher."
        if more := [token for token in known if token not in written]:
            raise ValueError(f"{cause}, but {path} has tokens that the policy lacks: {_format_tokens(more)}. {fix}")
        reader = Model(path=model.path, trust_remote_code=model.trust_remote_code)
        rows, needed = (int(load_config(one).get_text_config().vocab_size) for one in (reader, policy))
        if rows < needed:
            raise ValueError(f"{cause}, but {path} computes {rows} logits, fewer than the policy's {needed}. {fix}")
    if tokenizer.chat_template == policy_renderer.tokenizer.chat_template:
        return []
    return [f"{path} has another chat template than the policy. The teacher reads chats in the policy's template."]


def _format_tokens(tokens: list[str]) -> str:
    """Format the first three tokens and the total number, e.g. `'a', 'b', 'c', ... (23)`."""
    return ", ".join(map(repr, sorted(tokens)[:3])) + (f", ... ({len(tokens)})" if len(tokens) > 3 else "")
