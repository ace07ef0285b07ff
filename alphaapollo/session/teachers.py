"""Log-probs of teachers, on the policy's ranks or behind vLLM servers.

A server gets one request to /completions per row: the row's token ids as the prompt, and `prompt_logprobs=k`. It
answers with the log-probs of each prompt token and of the k most probable tokens at its position, at temperature 1.
Failed requests are retried for PATIENCE seconds, e.g. while the server restarts; then TeacherServerError ends the run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from alphaapollo.batching.batch import BatchLayout, Columns
from alphaapollo.config.schema import Model, Teacher, TeacherModel
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.controller.handles import PolicyGroup
from alphaapollo.models.load import load_config
from alphaapollo.rewards.openai_connection import make_connection_options
from alphaapollo.types import JsonObject, Row
from alphaapollo.utils.heartbeat import HEARTBEAT

CONNECTIONS = 64  # maximum concurrent requests to one server
PATIENCE = 300.0  # seconds for which a failed request is retried
MIN_TAIL = 1e-7  # smallest probability of all tokens beyond the top k, because log-probs are rounded to float32


async def compute_target_columns(
    teacher: Teacher, policy: PolicyGroup, model: Model, rows: Sequence[Row], layout: BatchLayout
) -> Columns[np.ndarray]:
    """Compute the log-probs of the teachers that the loss needs: on the policy's ranks, or by requests to servers.

    model: section of the policy. rows, layout: batch that the policy's ranks have loaded.
    """
    local = Columns[np.ndarray]()
    if teacher.uses_sampled_tokens and teacher.local_models:
        local = Columns(target_logprobs=layout.join_columns(await policy.compute_log_probs("teacher")))
    if not teacher.servers:
        return local
    scores = await score_rows(teacher, rows, load_config(model).get_text_config().vocab_size)
    if scores.target_logprobs is None or local.target_logprobs is None:
        return scores
    return replace(scores, target_logprobs=local.target_logprobs + scores.target_logprobs)


class TeacherServerError(ConnectionError):
    """Error: a teacher's server does not answer, or its answer cannot be used."""


class TokenLogprob(msgspec.Struct):
    logprob: float


class Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, TokenLogprob] | None]


class CompletionReply(msgspec.Struct):
    choices: list[Choice]


async def score_rows(teacher: Teacher, rows: Sequence[Row], vocabulary_size: int) -> Columns[np.ndarray]:
    """Request the log-probs of the n response tokens from the S teachers behind servers.

    Returns target_logprobs [n], summed with the weights of each row, or top_tokens [n, S, k] and top_token_logprobs.

    vocabulary_size: number of the policy's logits. A teacher's further tokens count as tokens beyond the top k.

    Raises TeacherServerError.
    """
    keys, k = list(teacher.models_by_key), (0 if teacher.uses_sampled_tokens else teacher.top_k or 0)
    starts = [row.response_start for row in rows]
    ends = np.cumsum([len(row.token_ids) - start for row, start in zip(rows, starts, strict=True)])
    logprobs = np.zeros(ends[-1], np.float32)
    tokens = np.zeros((ends[-1], len(teacher.servers), k), np.int32)
    token_logprobs = np.zeros((ends[-1], len(teacher.servers), k + 1), np.float32)

    async def score_row(client: TeacherClient, index: int, weight: float, server: int) -> None:
        row, end = rows[index], ends[index]
        scored = (await client.score(row.token_ids, k))[starts[index] :]
        part, sampled = slice(end - len(scored), end), row.token_ids[starts[index] :]
        if teacher.uses_sampled_tokens:
            logprobs[part] += [weight * scores[token].logprob for scores, token in zip(scored, sampled, strict=True)]
            return
        top = [select_top_tokens(scores, k, vocabulary_size) for scores in scored]
        tokens[part, server], token_logprobs[part, server] = zip(*top, strict=True)

    clients = [TeacherClient(key, model, PATIENCE) for key, model in teacher.servers.items()]
    try:
        async with asyncio.TaskGroup() as group:
            for server, client in enumerate(clients):
                for index, row in enumerate(rows):
                    shares = row.columns.get(TEACHER_SHARES) or [1.0] * len(keys)
                    if weight := shares[keys.index(client.key)]:
                        group.create_task(score_row(client, index, weight, server))
    except* TeacherServerError as errors:
        raise errors.exceptions[0] from None
    finally:
        for client in clients:
            await client.close()
    if teacher.uses_sampled_tokens:
        return Columns(target_logprobs=logprobs)
    return Columns(top_tokens=tokens, top_token_logprobs=token_logprobs)


def select_top_tokens(scores: dict[int, TokenLogprob], k: int, vocabulary_size: int) -> tuple[list[int], list[float]]:
    """Return the k most probable tokens, and their log-probs followed by the log-prob of all other tokens together.

    The first token is repeated if there are fewer than k tokens below `vocabulary_size`.
    """
    in_vocabulary = ((score.logprob, token) for token, score in scores.items() if token < vocabulary_size)
    top = sorted(in_vocabulary, reverse=True)[:k]
    tail = math.log(max(1.0 - math.fsum(math.exp(logprob) for logprob, _ in top), MIN_TAIL))
    top += top[:1] * (k - len(top))
    return [token for _, token in top], [*(logprob for logprob, _ in top), tail]


class TeacherClient:
    """HTTP client of one teacher's server. Created in a running event loop. key: configuration key of the teacher.
    patience: seconds for which a failed request is retried."""

    def __init__(self, key: str, model: TeacherModel, patience: float):
        connection = make_connection_options(key, model.base_url, model.api_key_env)
        import openai

        self.key, self.model, self.patience = key, model, patience
        retries = 4 + round(patience / 8)  # after pauses of 0.5, 1, 2, 4, 8, 8, ... seconds
        self.client = openai.AsyncOpenAI(**connection, timeout=model.timeout, max_retries=retries)
        self.slots = asyncio.Semaphore(CONNECTIONS)

    async def close(self) -> None:
        await self.client.close()

    async def score(self, token_ids: Sequence[int], k: int) -> list[dict[int, TokenLogprob]]:
        """Return the log-probs of each token and of the k most probable tokens at its position. {} for the first."""
        request = {"model": self.model.name, "prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": k}
        async with self.slots:
            reply = await self.post("/completions", request)
        try:
            scores = msgspec.json.decode(reply, type=CompletionReply).choices[0].prompt_logprobs
        except (msgspec.MsgspecError, IndexError) as error:
            raise self.make_error(f"returns no prompt_logprobs ({error}). Use a vLLM server") from None
        logprobs = [score or {} for score in scores]
        pairs = [*zip(token_ids, logprobs, strict=False)]
        if len(logprobs) != len(token_ids) or any(token not in of_position for token, of_position in pairs[1:]):
            raise self.make_error("does not return the log-prob of each token of a request. Use a vLLM server")
        return logprobs

    async def post(self, url: str, request: JsonObject) -> bytes:
        """Send a request and return the body of the answer. Raises TeacherServerError."""
        import httpx
        import openai

        try:
            with HEARTBEAT.record_call("a request", url, self.patience + self.model.timeout):
                return (await self.client.post(url, cast_to=httpx.Response, body=request)).content
        except openai.APIError as error:
            raise self.make_error(
                f"does not answer a request ({type(error).__name__}: {str(error)[:300]}). Check that it has the model "
                f"{self.model.name}, or raise {self.key}.timeout={self.model.timeout:g}"
            ) from None

    def make_error(self, problem: str) -> TeacherServerError:
        return TeacherServerError(f"{self.key}.base_url={self.model.base_url}: the server {problem}.")
