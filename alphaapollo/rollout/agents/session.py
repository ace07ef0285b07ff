"""Session of an agent: the requests of one program, and the exact tokens of their prompts and answers.

    request 1   P1 -> A1
    request 2   P1 A1 + new messages -> A2          continues request 1: its tokens are reused, not rendered again
    request 3   P3 -> A3                            another chat, e.g. of a sub-agent: a new branch

The answers of a session form a forest. Each path from a root becomes one row to train on (rows.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from alphaapollo.data.image_messages import IMAGE_PART
from alphaapollo.engines.http_api import ChatMessages, History, ParseAnswer, RequestedSampling, SampledAnswer
from alphaapollo.rewards.base import convert_to_float
from alphaapollo.types import IMAGE_MARK, EncodedImage, ImageInput, JsonObject, Sampling, StopReason

SHOWN_CHARS = 60  # characters of a message in a description


class MessageKey(NamedTuple):
    """What identifies a message of a chat. Two messages with one key are the same message.

    For answers, it ignores what clients change without changing the message: surrounding whitespace, the format of
    JSON arguments, ids of tool calls, and reasoning that is not sent back.
    """

    role: str
    text: str
    tool_calls: tuple[tuple[str, str], ...] = ()
    images: tuple[str, ...] = ()  # digests of the images at the marks of the text

    def __str__(self) -> str:
        calls = "".join(f" {name}({arguments})" for name, arguments in self.tool_calls)
        return f"{self.role}: {self.text[:SHOWN_CHARS]!r}{calls[:SHOWN_CHARS]}"


def make_answer_key(content: str, tool_calls: list[tuple[str, str]]) -> MessageKey:
    """Return the key of an answer of the model. tool_calls: (name, arguments as JSON)."""
    return MessageKey("assistant", content.strip(), tuple((name, _normalize_json(text)) for name, text in tool_calls))


def make_message_keys(messages: ChatMessages) -> tuple[list[MessageKey], list[int]]:
    """Return the keys of a chat, and for each key the index after its last message. Consecutive messages of the
    assistant are one answer, which some APIs send as several items."""
    keys: list[MessageKey] = []
    ends: list[int] = []
    for end, message in enumerate(messages, start=1):
        text = _read_text(message.get("content"))
        if message["role"] == "assistant":
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            key = make_answer_key(text, [(function["name"], function["arguments"]) for function in functions])
            if keys and keys[-1].role == "assistant":
                before, _ = keys.pop(), ends.pop()
                key = MessageKey("assistant", (before.text + text).strip(), before.tool_calls + key.tool_calls)
        else:
            key = MessageKey(message["role"], text, images=_list_digests(message.get("content")))
        keys.append(key)
        ends.append(end)
    return keys, ends


def _read_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts, has_images = list[str](), bool(_list_digests(content))
    for part in content:
        text = part["text"] if part.get("type") == "text" else _normalize_json(part)
        texts.append(text.replace(IMAGE_MARK, "") if has_images else text)
        if part.get("type") == IMAGE_PART:
            texts[-1] = IMAGE_MARK
    return "".join(texts)


def _list_digests(content: Any) -> tuple[str, ...]:
    is_list = isinstance(content, list)
    return tuple(part["uuid"] for part in content if part.get("type") == IMAGE_PART) if is_list else ()


def _normalize_json(value: object) -> str:
    """Return JSON without differences of whitespace and order; a text that is no JSON unchanged."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return str(value)
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@dataclass(eq=False)
class Answer:
    """Sampled answer: a node of the session's forest."""

    request: Request
    sampled: SampledAnswer
    parent: Answer | None  # the answer that the prompt continues
    reward: float | None = None  # sum of the rewards for this answer alone; None: none was given

    def add_reward(self, reward: float) -> None:
        self.reward = reward + (self.reward or 0.0)

    @property
    def chat_keys(self) -> list[MessageKey]:
        """Keys of the messages up to and with this answer."""
        return [*self.request.keys, make_answer_key(self.sampled.content, self.sampled.tool_calls)]

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt_ids

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the session cut the answer, not the client's max_tokens."""
        completion = self.sampled.completion
        return completion.stop_reason is StopReason.LENGTH and len(completion.token_ids) >= self.request.token_limit

    @property
    def images(self) -> tuple[ImageInput, ...]:
        """Images of the prompt."""
        return self.request.images

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt and of the answer."""
        return [*self.prompt_ids, *self.sampled.completion.token_ids]

    @property
    def path(self) -> list[Answer]:
        """Answers from the root to this one."""
        path = [self]
        while parent := path[-1].parent:
            path.append(parent)
        return path[::-1]


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a session."""

    max_model_len: int  # tokens of a prompt and its answer
    max_requests: int  # for answers; a request for n answers counts n times
    max_tokens_per_turn: int | None = None
    reward: float | None = None  # env.limit_reward


@dataclass(eq=False)
class AgentSession:
    """Requests of one program that runs for one sample of a prompt.

    Args:
        sampling: the policy's sampling settings. `max_tokens` limits all tokens of a path after its first prompt.
        derive_seed: number -> seed of a request.
    """

    sampling: Sampling
    derive_seed: Callable[[int], int]
    limits: SessionLimits
    name: str = ""  # of the episode
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # the API key of the program
    reward_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # only the program itself knows it
    requests: list[Request] = field(default_factory=list)  # finished requests, in the order of their answers
    encoded_images: dict[str, EncodedImage] = field(default_factory=dict)  # of all chats, by digest
    num_started: int = 0  # requested answers, including failed ones, but not retries
    reached_limit: str = ""  # limit of requests that the session has reached
    overflow: str = ""  # error of the last request if its prompt was too long
    engine_error: Exception | None = None
    engine_failed: asyncio.Event = field(default_factory=asyncio.Event)
    refused_reward: str = ""  # error of a reward that the program gave
    overridden: JsonObject = field(default_factory=dict)  # sampling settings of clients that are not used
    _answers: dict[bytes, Answer] = field(default_factory=dict)  # by digest of template variables, chat and answer
    _samplings: Counter[str] = field(default_factory=Counter)  # prompt digest -> how often it was sampled

    @property
    def answers(self) -> list[Answer]:
        """Answers that the program received."""
        return [answer for request in self.requests if request.is_delivered for answer in request.answers]

    def count_request(self, request: Request, num_answers: int) -> None:
        """Count a new request for answers, but no retry. Raises ValueError at the limit of requests."""
        if self.find_undelivered(request) is None:
            if self.num_started + num_answers > self.limits.max_requests:
                self.reached_limit = f"env.agent.max_requests={self.limits.max_requests}"
                raise ValueError(f"The session has reached its limit of requests, {self.reached_limit}.")
            self.num_started += num_answers

    def give_reward(self, request_id: str, reward: float) -> None:
        """Add a reward for a request, in equal parts for its answers. Raises ValueError if there is no such request."""
        found = [request for request in self.requests if request.id == request_id]
        if not found:
            known = ", ".join(request.id for request in self.requests[-3:])
            raise ValueError(f"request_id={request_id}: this session has no such request. The last ones are: {known}.")
        for answer in found[0].answers:
            answer.add_reward(reward / len(found[0].answers))

    def give_turn_rewards(self, rewards: object) -> None:
        """Add one reward for each answer, in order. Raises TypeError for a value that is no list of numbers, ValueError
        for another number of rewards or a number that is not finite."""
        if not isinstance(rewards, list):
            raise TypeError(f"turn_rewards is a {type(rewards).__name__}. Return a list of numbers.")
        if len(rewards) != len(self.answers):
            raise ValueError(
                f"turn_rewards has {len(rewards)} numbers for {len(self.answers)} answers. Return one for each answer."
            )
        numbers = [convert_to_float(reward, f"turn_rewards[{index}]") for index, reward in enumerate(rewards)]
        for answer, number in zip(self.answers, numbers, strict=True):
            answer.add_reward(number)

    def find_answer(self, keys: list[MessageKey], template_variables: str) -> tuple[Answer | None, int]:
        """Return the last answer in a chat that this session sampled, and the number of keys up to and with it."""
        digests = _digest_chats(keys[:-1], template_variables)
        for count in range(len(digests), 0, -1):
            if answer := self._answers.get(digests[count - 1]):
                answer.request.is_delivered = True  # the client knows it, even if its connection broke
                return answer, count
        return None, 0

    def describe_difference(self, keys: list[MessageKey], template_variables: str) -> str:
        """Describe where a chat first differs from the most similar earlier chat of this session."""
        chats = [(one.request.template_variables, one.chat_keys) for one in self._answers.values()]
        if not chats:
            return "no earlier request of this session has this history"

        def count_equal(chat: tuple[str, Sequence[MessageKey]]) -> int:
            pairs = enumerate(zip_longest(chat[1], keys))
            return next((index for index, (old, new) in pairs if old != new), len(keys))

        variables, known = max(chats, key=lambda chat: (count_equal(chat), len(chat[1])))
        index = count_equal((variables, known))
        if index >= len(known) and variables != template_variables:
            return f"tools or template variables changed: {_describe_change(variables, template_variables)}"
        old = str(known[index]) if index < len(known) else "the end of the chat"
        new = str(keys[index]) if index < len(keys) else "the end of the chat"
        return f"message {index}: {old} became {new}"

    def add_answers(self, request: Request) -> None:
        """Add the answers of a finished request."""
        self.requests.append(request)
        for answer in request.answers:
            self._answers[_digest_chats(answer.chat_keys, request.template_variables)[-1]] = answer

    def find_undelivered(self, request: Request) -> Request | None:
        """Return an earlier request with the same body whose answer did not reach the client. The client of a retry
        knows better than this server, but it has received the answers that other requests continue."""
        same = [other for other in self.requests if other.body_digest == request.body_digest]
        lost = [other for other in same if other.is_delivered is False]
        if lost or not request.is_retry:
            return lost[0] if lost else None
        continued = {answer.parent.request for answer in self.answers if answer.parent}
        return next((other for other in reversed(same) if other not in continued), None)

    def count_sampling(self, prompt_ids: list[int], change: int = 1) -> int:
        """Return a number for the seed, which depends on the prompt and on how often it was sampled before. It does not
        depend on the order of concurrent requests."""
        digest = hashlib.blake2b(array("i", prompt_ids).tobytes(), digest_size=6).hexdigest()
        count = self._samplings[digest]
        self._samplings[digest] += change
        return int(hashlib.blake2b(f"{digest}.{count}".encode(), digest_size=6).hexdigest(), 16)


def _digest_chats(keys: Sequence[MessageKey], template_variables: str) -> list[bytes]:
    """Return a digest of the first 1, 2, ... messages of a chat."""
    digests, digest = [], hashlib.blake2b(template_variables.encode(errors="surrogatepass"))
    for key in keys:
        digest.update(repr(key).encode())
        digests.append(digest.digest())
    return digests


def _describe_change(old: str, new: str) -> str:
    start = next((index for index, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    begin = max(0, start - SHOWN_CHARS // 2)
    return f"{old[begin : start + SHOWN_CHARS]!r} became {new[begin : start + SHOWN_CHARS]!r}"


@dataclass(eq=False)
class Request:
    """One request of a program for a completion (engines/http_api.py: HttpRequest)."""

    session: AgentSession
    body_digest: str
    role: str = ""  # header x-role
    is_retry: bool = False  # the client says that it did not receive an earlier answer to this request
    id: str = ""
    seed: int = 0  # of the sampling
    prompt_ids: list[int] = field(default_factory=list)
    images: tuple[ImageInput, ...] = ()  # images whose placeholders are in prompt_ids, in order
    keys: list[MessageKey] = field(default_factory=list)
    template_variables: str = ""
    answers: list[Answer] = field(default_factory=list)
    difference: str = ""  # why earlier tokens could not be reused, although the request has a history
    is_constrained: bool = False
    is_delivered: bool | None = None  # whether the client received the complete answer, None until it is sent
    parse_answer: ParseAnswer | None = None
    token_limit: int = 0  # tokens of an answer that the session's own limits allow
    _parent: Answer | None = None  # last answer of the session in the chat, if its tokens are reused
    _earlier: Request | None = None  # identical request whose answer is sent again
    _outputs: Any = None

    @property
    def encoded_images(self) -> dict[str, EncodedImage]:
        return self.session.encoded_images

    def find_history(self, messages: ChatMessages, template_variables: str) -> History | None:
        self.template_variables = template_variables
        self.keys, ends = make_message_keys(messages)
        found, count = self.session.find_answer(self.keys, template_variables)
        if any(key.role == "assistant" for key in self.keys[count:-1]):
            self.difference = self.session.describe_difference(self.keys, template_variables)
        if found is None:
            return None
        self._parent = found
        return History(found.token_ids, ends[count - 2] if count > 1 else 0, ends[count - 1])

    def discard_history(self) -> None:
        """Make this request start a branch, because its history cannot be rendered after the known tokens."""
        self._parent = None
        self.difference = "the chat template does not show this history after the sampled tokens"

    def check_prompt(self, token_ids: list[int]) -> None:
        budget = self._count_root_tokens(token_ids) + self.session.sampling.max_tokens
        limit = min(self.session.limits.max_model_len, budget)
        self.session.overflow = ""
        if len(token_ids) >= limit:
            self.session.overflow = (
                f"This model's maximum context length is {limit} tokens. However, the messages resulted in "
                f"{len(token_ids)} tokens. Please reduce the length of the messages."
            )
            raise ValueError(self.session.overflow)

    def _count_root_tokens(self, prompt_ids: list[int]) -> int:
        return len(self._parent.path[0].prompt_ids if self._parent else prompt_ids)

    def start_sampling(self, request_id: str, prompt_ids: list[int], wanted: RequestedSampling) -> Sampling:
        session, known = self.session, self._parent.token_ids if self._parent else []
        if prompt_ids[: len(known)] != known:  # e.g. truncated by the client's settings
            self.discard_history()
        self.id, self.prompt_ids, self.is_constrained = request_id, prompt_ids, wanted.is_constrained
        self._earlier = session.find_undelivered(self)
        budget = session.sampling.max_tokens - len(prompt_ids) + self._count_root_tokens(prompt_ids)
        self.token_limit = max(1, min(budget, session.limits.max_tokens_per_turn or budget))
        max_tokens = min(wanted.max_tokens, self.token_limit)
        self.seed = session.derive_seed(session.count_sampling(prompt_ids))
        return replace(session.sampling, max_tokens=max(1, max_tokens), seed=self.seed)

    def get_sampled_outputs(self) -> Any | None:
        return self._earlier._outputs if self._earlier else None

    def record_answers(self, answers: list[SampledAnswer], outputs: object) -> None:
        if self._earlier is not None:
            self.session.requests.remove(self._earlier)
        self.answers = [Answer(self, answer, self._parent) for answer in answers]
        for answer, earlier in zip(self.answers, self._earlier.answers if self._earlier else (), strict=False):
            answer.reward = earlier.reward
        self._outputs = outputs
        self.session.add_answers(self)

    def record_engine_error(self, error: Exception) -> None:
        self.session.engine_error = error
        self.session.engine_failed.set()

    def finish(self, is_delivered: bool) -> None:
        """Finish the request. If its answer was not delivered, a retry gets the same one."""
        self.is_delivered = bool(self.is_delivered or (is_delivered and self.answers))
        if not self.is_delivered and self.prompt_ids:
            self.session.count_sampling(self.prompt_ids, -1)
