"""Judges: language models that score completions by a score, the criteria of a rubric, or a comparison.

    JudgeClient.ask -> cache, or the same judgement in flight -> free connection -> request, with retries -> verdict

The openai package retries a request MAX_RETRIES times, with growing pauses, after status 408, 409, 429 or 5xx and
after a broken connection. A reply without a verdict is requested once more. A judgement that fails raises ValueError
with the reason, and never gives a score of 0."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from alphaapollo.config.schema import Criterion, Judge, Reward, Rubric
from alphaapollo.rewards.base import get_question
from alphaapollo.rewards.openai_connection import MALFORMED_RESPONSE_ERRORS, make_connection_options
from alphaapollo.types import JudgeUsage, Prompt, Score
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.redaction import redact, replace_surrogates
from alphaapollo.utils.text import fill_template
from alphaapollo.utils.thoughts import remove_thoughts

MAX_RETRIES = 4  # retries of one request
MAX_REPLIES = 2  # a second reply is requested if the first has no verdict
DEADLINE = 3  # time limit of a request with all its retries, as a multiple of reward.judge.timeout
ValueT = TypeVar("ValueT")
CompleteMessage = Callable[[str], Awaitable[str | None]]


class JudgeError(ValueError):
    """Error for a judgement that failed after all retries."""


def check_judge_server(judge: Judge) -> dict[str, Any]:
    """Return the connection options of reward.judge. Raises ValueError if no model is set, the openai package is
    missing, or no API key is set for OpenAI's own server."""
    if not judge.model:
        raise ValueError(
            "reward.judge.model is empty, but a judge grades rows or is in reward.components. Set it to the model's "
            "name, and set reward.judge.base_url if the model is not on OpenAI's server."
        )
    return make_connection_options("reward.judge", judge.base_url, judge.api_key_env)


class JudgeServer:
    """Model behind an OpenAI-compatible server. Raises ValueError like check_judge_server."""

    def __init__(self, judge: Judge):
        connection = check_judge_server(judge)
        import openai

        self._judge = judge
        self._client = openai.AsyncOpenAI(**connection, timeout=judge.timeout, max_retries=MAX_RETRIES)

    async def complete(self, content: str) -> str | None:
        """Return the reply to a user message. Raises JudgeError after all retries, or if the reply is malformed."""
        import openai

        judge, deadline = self._judge, DEADLINE * self._judge.timeout
        try:
            with HEARTBEAT.record_call("judge", timeout=deadline):
                async with asyncio.timeout(deadline):
                    reply = await self._client.chat.completions.create(
                        model=judge.model,
                        messages=[{"role": "user", "content": content}],
                        temperature=judge.temperature,
                        max_tokens=judge.max_tokens,
                    )
                    return reply.choices[0].message.content
        except (TimeoutError, openai.APIError, *MALFORMED_RESPONSE_ERRORS) as error:
            late = f" within {deadline:g} s" if isinstance(error, TimeoutError) else ""
            reason = f"the judge gave no answer of an OpenAI-compatible server{late}: {type(error).__name__}: {error}"
            raise JudgeError(redact(reason)) from error

    async def close(self) -> None:
        await self._client.close()


class JudgeClient:
    """Client of a judge model, with a limit of concurrent judgements and a cache. Belongs to one event loop."""

    def __init__(self, judge: Judge, complete: CompleteMessage):
        self._judge, self._complete = judge, complete
        self._free_connections: asyncio.LifoQueue[int] = asyncio.LifoQueue()  # numbers, which name lanes in a trace
        for number in reversed(range(judge.max_connections)):
            self._free_connections.put_nowait(number)
        self._verdicts: OrderedDict[object, asyncio.Task[Any]] = OrderedDict()  # by message, least recently used first
        self._running: set[asyncio.Task[Any]] = set()

    async def ask(self, content: str, read_verdict: Callable[[str], ValueT]) -> tuple[ValueT, JudgeUsage]:
        """Send a user message. Returns what `read_verdict`, which may raise ValueError, reads in the reply, and the
        usage. Equal messages get the same verdict. Failures are not cached. Raises JudgeError if all replies fail."""
        content = replace_surrogates(content)  # completions may contain them
        start, key = time.perf_counter(), content if self._judge.cache_size else object()  # object(): a unique key
        task, is_cached = self._verdicts.get(key), key in self._verdicts
        if task is None:
            task = self._verdicts[key] = asyncio.create_task(self._ask_model(content, read_verdict))
            self._running.add(task)
            task.add_done_callback(partial(self._end_judgement, key))
        self._verdicts.move_to_end(key)
        value = await asyncio.shield(task)  # if this caller is cancelled, other callers may still need the task
        return value, JudgeUsage(1, int(is_cached), time.perf_counter() - start)

    def clear_cache(self) -> None:
        """Forget all verdicts, because the judge model has changed."""
        self._verdicts.clear()

    async def close(self) -> None:
        """End the judgements in flight, which raise JudgeError."""
        await asyncio.sleep(0)  # a task that has not started yet would raise CancelledError
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _end_judgement(self, key: object, task: asyncio.Task[Any]) -> None:
        """Forget a failure, and the least recently used verdicts beyond reward.judge.cache_size."""
        self._running.discard(task)
        if task.exception() and self._verdicts.get(key) is task:
            del self._verdicts[key]
        while len(self._verdicts) > max(self._judge.cache_size, len(self._running)):
            self._verdicts.popitem(last=False)

    async def _ask_model(self, content: str, read_verdict: Callable[[str], ValueT]) -> ValueT:
        number = None
        try:
            number = await self._free_connections.get()
            with HEARTBEAT.use_track(lane=f"judge {number}"):
                for _ in range(MAX_REPLIES):
                    reply = remove_thoughts(await self._complete(content) or "")
                    try:
                        return read_verdict(reply)
                    except ValueError as error:
                        problem = str(error)
            raise JudgeError(f"{problem} (in {MAX_REPLIES} replies)")
        except asyncio.CancelledError as error:  # only `close` cancels it
            raise JudgeError("the judge was closed before it gave a verdict") from error
        finally:
            if number is not None:
                self._free_connections.put_nowait(number)


async def wait_for_all(judgements: Iterable[Awaitable[ValueT]]) -> list[ValueT]:
    """Wait for all judgements and return their results. If one fails, raise its error after the others have ended, so
    that no request is in flight any more, e.g. at the engine of a policy that judges itself."""
    results = await asyncio.gather(*judgements, return_exceptions=True)
    if errors := [result for result in results if isinstance(result, BaseException)]:
        raise errors[0]
    return results  # type: ignore[return-value]


# One line with the name and a separator; only signs before the name, around the value and between them.
VERDICT = r"^[^\w\n]*+{}(?=\W*?[:=])\W*?({})[^\w\n]*+$"
SCORE = re.compile(VERDICT.format("SCORE", r"-?\d+(?:\.\d+)?|-?\.\d+"), re.IGNORECASE | re.MULTILINE)
WINNER = re.compile(VERDICT.format("WINNER", "A|B|TIE"), re.IGNORECASE | re.MULTILINE)
JSON_OBJECT = re.compile(r"\{[^{}]*\}")
TEXT_KEYS, WEIGHT_KEYS = ("text", "criterion", "description"), ("weight", "points")  # of a row's criterion
MAX_SHOWN = 120  # characters of a reply in a failure reason


async def score_answer(client: JudgeClient, reward: Reward, prompt: Prompt, completion: str) -> Score:
    """Return the judge's score from 0 to 1. The component `accuracy` is 1 for scores of at least 0.5."""
    score, usage = await client.ask(_fill_for_answer(reward.judge.prompt, prompt, completion), read_score)
    return Score(score, {"accuracy": float(score >= 0.5)}, judge_usage=usage)


async def score_by_rubric(client: JudgeClient, reward: Reward, prompt: Prompt, completion: str) -> Score:
    """Return the weighted mean of the criteria's verdicts. The components are `accuracy`, which is 1 for scores of at
    least 0.5, and `rubric/NAME` for each criterion of reward.rubric.criteria."""
    criteria = list_criteria(reward.rubric, prompt)
    shown = "\n".join(f"{name}: {criterion.text}" for name, criterion in criteria.items())
    example = json.dumps(dict.fromkeys(criteria, 1))
    content = _fill_for_answer(reward.rubric.prompt, prompt, completion, criteria=shown, verdicts=example)
    verdicts, usage = await client.ask(content, partial(read_criteria, names=criteria))
    score = compute_rubric_score(verdicts, criteria)
    named = {f"rubric/{name}": verdicts[name] for name in reward.rubric.criteria}
    return Score(score, {"accuracy": float(score >= 0.5)} | named, judge_usage=usage)


async def compare_with_reference(client: JudgeClient, reward: Reward, prompt: Prompt, completion: str) -> Score:
    """Compare the completion with the ground truth in both orders, in two judgements. Returns 1 if the completion is
    better in both, 0 if it is worse in both, and 0.5 for a tie or if the two judgements disagree.

    The component `pairwise/consistent` is 1 if both judgements agree. If not, the judge prefers a position."""
    if prompt.ground_truth_text is None:
        raise ValueError(f"row {prompt.id} has no ground truth with which the judge could compare the completion")
    answers = [_quote_answer(text) for text in (completion, prompt.ground_truth_text)]
    question, template = get_question(prompt), reward.judge.pairwise_prompt
    contents = [
        fill_template(template, question=question, answer_a=first, answer_b=second)
        for first, second in (answers, answers[::-1])
    ]
    verdicts = await wait_for_all(client.ask(content, read_winner) for content in contents)
    (verdict, usage), (reversed_verdict, reversed_usage) = verdicts  # 1: the first answer is better
    is_consistent = verdict == 1 - reversed_verdict
    components, accuracy = {"pairwise/consistent": float(is_consistent)}, float(is_consistent and verdict == 1)
    score = verdict if is_consistent else 0.5
    return Score(score, components, judge_usage=usage + reversed_usage, accuracy=accuracy)


JudgeFunction = Callable[[JudgeClient, Reward, Prompt, str], Awaitable[Score]]
JUDGES: dict[str, JudgeFunction] = {
    "judge": score_answer,
    "rubric": score_by_rubric,
    "pairwise": compare_with_reference,
}
"""Judges by name, which is both a data source and a reward component."""


def list_criteria(rubric: Rubric, prompt: Prompt) -> dict[str, Criterion]:
    """Return the criteria of a row by name: those of reward.rubric, and those of its column `rubric`, which are named
    1, 2, ... Raises ValueError if the row's rubric is malformed, or if no criterion has a positive weight."""
    criteria = dict(rubric.criteria)
    entries = prompt.extra_info.get("rubric") or []
    try:
        for number, entry in enumerate(entries, 1):
            text = next(entry[key] for key in TEXT_KEYS if entry.get(key))
            weight = next((entry[key] for key in WEIGHT_KEYS if entry.get(key) is not None), 1.0)
            criteria[str(number)] = Criterion(text=text, weight=weight)
    except (TypeError, AttributeError, ValueError, StopIteration) as error:
        shown = str(entries)[:MAX_SHOWN]
        raise ValueError(
            f"row {prompt.id} has the rubric {shown}. Write a list of {{text: TEXT, weight: NUMBER}}."
        ) from error
    if not any(criterion.weight > 0 for criterion in criteria.values()):
        raise ValueError(
            f"row {prompt.id} has no criterion with a positive weight. Set reward.rubric.criteria, or add a column "
            "rubric to the data."
        )
    return criteria


def compute_rubric_score(verdicts: Mapping[str, float], criteria: Mapping[str, Criterion]) -> float:
    """Compute sum(weight * verdict) / sum of the positive weights (arXiv 2505.08775, section 3). At most 1; below 0 if
    faults, which have negative weights, outweigh everything else."""
    possible = math.fsum(max(criterion.weight, 0.0) for criterion in criteria.values())
    return math.fsum(criterion.weight * verdicts[name] for name, criterion in criteria.items()) / possible


def _fill_for_answer(template: str, prompt: Prompt, completion: str, **fields: str) -> str:
    """Fill a template with question, ground truth, answer (the completion without its thoughts) and `fields`."""
    truth = "none is given" if prompt.ground_truth is None else str(prompt.ground_truth_text)
    answer = _quote_answer(completion)
    return fill_template(template, question=get_question(prompt), ground_truth=truth, answer=answer, **fields)


def _quote_answer(completion: str) -> str:
    """Return a completion without thoughts, in which no tag ends the template's part of the answer."""
    return remove_thoughts(completion).strip().replace("</answer", "<\\/answer")


def read_score(reply: str) -> float:
    """Return x of the last line `SCORE: x`. Raises ValueError without such a line, or if x is not between 0 and 1."""
    score = float(_read_last_line(SCORE, "SCORE", reply))
    if not 0 <= score <= 1:
        raise ValueError(f"the judge's score {score:g} is not between 0 and 1: {_shorten(reply)!r}")
    return score


def read_winner(reply: str) -> float:
    """Return 1, 0 or 0.5 for A, B or TIE in the last line `WINNER: x`. Raises ValueError without such a line."""
    return {"A": 1.0, "B": 0.0, "TIE": 0.5}[_read_last_line(WINNER, "WINNER", reply).upper()]


def _read_last_line(pattern: re.Pattern[str], name: str, reply: str) -> str:
    if not (found := pattern.findall(reply)):
        raise ValueError(f"the judge's answer has no line '{name}: ...': {_shorten(reply)!r}")
    return str(found[-1])


def read_criteria(reply: str, names: Collection[str]) -> dict[str, float]:
    """Return the last JSON object of a reply. Raises ValueError unless its keys are exactly `names`, and its values
    numbers from 0 to 1."""
    try:
        verdicts = json.loads(JSON_OBJECT.findall(reply)[-1])
    except (IndexError, ValueError) as error:
        raise ValueError(f"the judge's answer does not end with a JSON object: {_shorten(reply)!r}") from error
    if verdicts.keys() != set(names):
        raise ValueError(f"the judge's verdicts {_shorten(json.dumps(verdicts))} are not about {', '.join(names)}")
    for name, value in verdicts.items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"the judge's verdict about {name} is {value!r}, not a number from 0 to 1")
    return {name: float(verdicts[name]) for name in names}


def _shorten(text: str) -> str:
    return " ".join(text.split())[-MAX_SHOWN:]
