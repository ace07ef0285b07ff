"""Sessions of agents: the requests of one program to an engine's HTTP API (engines/vllm/http_api.py), and the exact
tokens of their prompts and answers.

    request 1   P1 -> A1
    request 2   P1 A1 + new messages -> A2          continues request 1: its tokens are reused, not rendered again
    request 3   P3 -> A3                            another chat, e.g. of a sub-agent: a new branch

The answers of a session form a forest. Each path from a root becomes one row to train on (rollout/agents/runner.py)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

from alphaapollo.data.image_messages import IMAGE_PART
from alphaapollo.rewards.base import convert_to_float
from alphaapollo.types import (
    IMAGE_MARK,
    Completion,
    EncodedImage,
    ImageInput,
    JsonObject,
    Message,
    Sampling,
    StopReason,
)
from alphaapollo.utils.thoughts import Marks

SHOWN_CHARS = 60  # characters of a message in a description


class MessageKey(NamedTuple):
    """Identity of a message of a chat. Messages with equal keys are the same message.

    The key of an answer omits what clients change without changing the message: surrounding whitespace, the format of
    JSON arguments, ids of tool calls, and reasoning that is not sent back."""

    role: str
    text: str
    tool_calls: tuple[tuple[str, str], ...] = ()
    images: tuple[str, ...] = ()  # digests of the images at the marks of the text

    def __str__(self) -> str:
        calls = "".join(f" {name}({arguments})" for name, arguments in self.tool_calls)
        return f"{self.role}: {self.text[:SHOWN_CHARS]!r}{calls[:SHOWN_CHARS]}"


def make_answer_key(content: str, tool_calls: Sequence[tuple[str, str]]) -> MessageKey:
    """Return the key of an answer of the model. tool_calls: (name, arguments as JSON)."""
    return MessageKey("assistant", content.strip(), tuple((name, _normalize_json(text)) for name, text in tool_calls))


def make_message_keys(messages: Sequence[JsonObject]) -> tuple[list[MessageKey], list[int]]:
    """Return the keys of a chat, and for each key the index after its last message. Consecutive messages of the
    assistant get one key, because some APIs send an answer as several items. messages: as the chat template receives
    them."""
    keys: list[MessageKey] = []
    ends: list[int] = []
    for end, message in enumerate(messages, start=1):
        text, images = _read_content(message.get("content"))
        if message["role"] == "assistant":
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            key = make_answer_key(text, [(function["name"], function["arguments"]) for function in functions])
            if keys and keys[-1].role == "assistant":
                first_part, _ = keys.pop(), ends.pop()
                key = MessageKey("assistant", (first_part.text + text).strip(), first_part.tool_calls + key.tool_calls)
        else:
            key = MessageKey(message["role"], text, images=images)
        keys.append(key)
        ends.append(end)
    return keys, ends


def _read_content(content: Any) -> tuple[str, tuple[str, ...]]:
    """Return the text of a message, with a mark for each image, and the digests of its images."""
    if content is None or isinstance(content, str):
        return content or "", ()
    images = tuple(part["uuid"] for part in content if part.get("type") == IMAGE_PART)
    texts = []
    for part in content:
        text = part["text"] if part.get("type") == "text" else _normalize_json(part)
        text = text.replace(IMAGE_MARK, "") if images else text  # a text may contain the mark by chance
        texts.append(IMAGE_MARK if part.get("type") == IMAGE_PART else text)
    return "".join(texts), images


def _normalize_json(value: object) -> str:
    """Return a value as JSON with sorted keys and uniform whitespace. A text that is not JSON is returned unchanged."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return str(value)
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True)
class SessionLimits:
    max_model_len: int  # tokens of a prompt and its answer
    max_requests: int  # a request for n answers counts n times
    max_tokens_per_turn: int | None = None
    reward: float | None = None  # reward of an episode that a limit ends (env.limit_reward)


@dataclass(eq=False)
class AgentSession:
    """Requests of one program that runs for one sample of a prompt."""

    sampling: Sampling  # of the policy; max_tokens limits all tokens of a path after its first prompt
    derive_seed: Callable[[int], int]  # number -> seed of a request
    limits: SessionLimits
    name: str = ""  # of the episode
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # the API key of the program
    requests: list[Request] = field(default_factory=list)  # finished requests, in the order of their answers
    encoded_images: dict[str, EncodedImage] = field(default_factory=dict)  # images that the program sent, by digest
    num_started: int = 0  # requested answers, including failed ones, but not retries
    reached_limit: str = ""  # the limit of requests, after the session has reached it
    prompt_error: str = ""  # error of the last request if its prompt was too long
    num_refused: int = 0  # requests that the endpoint refused (4xx), except refusals at a limit of the session
    refusal: str = ""  # error of the first refused request
    is_refused: bool = False  # whether a request was refused since the last answer
    error: str = ""  # exception of the program
    engine_error: Exception | None = None
    engine_failed: asyncio.Event = field(default_factory=asyncio.Event)
    _samplings: Counter[str] = field(default_factory=Counter)  # prompt digest -> how often it was sampled

    @property
    def answers(self) -> list[Answer]:
        """Answers that the program received."""
        return [answer for request in self.requests if request.is_delivered for answer in request.answers]

    def count_request(self, request: Request, num_answers: int) -> None:
        """Count the answers that a request asks for, unless it is a retry. Raises ValueError above the limit."""
        if self.find_undelivered(request) is None:
            if self.num_started + num_answers > self.limits.max_requests:
                self.reached_limit = f"env.agent.max_requests={self.limits.max_requests}"
                raise ValueError(f"The session has reached its limit of requests, {self.reached_limit}.")
            self.num_started += num_answers

    def record_refusal(self, error: str) -> None:
        """Record that the endpoint refused a request, unless the reason is a limit of the session."""
        if not self.prompt_error and not self.reached_limit:
            self.num_refused += 1
            self.refusal, self.is_refused = self.refusal or error[:500], True

    def give_reward(self, request_id: str, reward: float) -> None:
        """Add a reward for a request, in equal parts for its answers. Raises ValueError if there is no such request."""
        rewarded = next((request for request in self.requests if request.id == request_id), None)
        if rewarded is None:
            raise ValueError(f"request_id={request_id}: this session has no such request.")
        for answer in rewarded.answers:
            answer.add_reward(reward / len(rewarded.answers))

    def give_turn_rewards(self, rewards: object) -> None:
        """Add one reward for each answer, in order. Raises TypeError for anything but a list of numbers, and ValueError
        if a reward is not finite or there is not one reward for each answer."""
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
        """Find the last message of a chat that is an answer of this session. Returns the answer, and the number of keys
        of the chat up to and including the answer's key."""
        answers = [answer for request in reversed(self.requests) for answer in reversed(request.answers)]
        for answer in sorted(answers, key=lambda answer: len(answer.request.keys), reverse=True):
            known = answer.chat_keys
            continues_answer = len(known) < len(keys) and keys[: len(known)] == known
            if continues_answer and answer.request.template_variables == template_variables:
                answer.request.is_delivered = True  # the client has the answer, even if its connection broke
                return answer, len(known)
        return None, 0

    def describe_difference(self, keys: list[MessageKey], template_variables: str) -> str:
        """Describe where a chat first differs from the most similar earlier chat of this session."""
        answers = [answer for request in self.requests for answer in request.answers]
        if not answers:
            return "no earlier request of this session has this history"

        def count_equal_messages(answer: Answer) -> int:
            pairs = zip(answer.chat_keys, keys, strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        closest = max(answers, key=lambda answer: (count_equal_messages(answer), len(answer.chat_keys)))
        index = count_equal_messages(closest)
        if index >= len(closest.chat_keys) and closest.request.template_variables != template_variables:
            return "tools or template variables changed"
        chats = closest.chat_keys, keys
        old, new = (str(chat[index]) if index < len(chat) else "the end of the chat" for chat in chats)
        return f"message {index}: {old} became {new}"

    def find_undelivered(self, request: Request) -> Request | None:
        """Return an earlier request with the same body whose answer did not reach the client. If the client marks this
        request as a retry, the earlier answer may have been sent, unless another request continues that answer."""
        identical = [other for other in self.requests if other.body_digest == request.body_digest]
        undelivered = [other for other in identical if other.is_delivered is False]
        if undelivered:
            return undelivered[0]
        continued_requests = {answer.parent.request for answer in self.answers if answer.parent}
        candidates = reversed(identical) if request.is_retry else ()
        return next((other for other in candidates if other not in continued_requests), None)

    def count_sampling(self, prompt_ids: list[int], change: int = 1) -> int:
        """Count a sampling of the prompt, and return a number for its seed, which depends only on the prompt and on how
        often it was sampled before. change: -1 takes back an earlier call."""
        digest = hashlib.blake2b(array("i", prompt_ids).tobytes(), digest_size=6).hexdigest()
        count = self._samplings[digest]
        self._samplings[digest] += change
        return int(hashlib.blake2b(f"{digest}.{count}".encode(), digest_size=6).hexdigest(), 16)


@dataclass(eq=False)
class Request:
    """One request of a program for a completion. The engine's HTTP API calls the methods in the order of this class."""

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
    parent: Answer | None = None  # last answer of the session in the chat, if its tokens are reused
    answers: list[Answer] = field(default_factory=list)
    outputs: Any = None  # what the engine returned
    earlier: Request | None = None  # identical request whose answer is sent again
    difference: str = ""  # why earlier tokens could not be reused, although the request has a history
    is_constrained: bool = False  # tokens were excluded from sampling, e.g. by a JSON schema
    is_delivered: bool | None = None  # whether the client received the complete answer, None until it is sent
    parse_answer: Callable[[str, list[int]], tuple[str, list[tuple[str, str]]]] | None = None
    """(text, token ids) -> content and tool calls, as the client receives them."""
    token_limit: int = 0  # tokens of an answer that the session's own limits allow

    def find_history(self, messages: Sequence[JsonObject], template_variables: str) -> tuple[int, int] | None:
        """Match the chat with the session's answers: set `parent` to the last answer whose tokens, and all before it,
        are known, and `difference` to the reason if later answers of the chat do not match. Returns the index of
        the first message of `parent` and the index after its last message, or None without a match.

        template_variables: everything else that the rendered chat depends on, e.g. tools."""
        self.template_variables = template_variables
        self.keys, ends = make_message_keys(messages)
        self.parent, count = self.session.find_answer(self.keys, template_variables)
        if any(key.role == "assistant" for key in self.keys[count:-1]):
            self.difference = self.session.describe_difference(self.keys, template_variables)
        if self.parent is None:
            return None
        start = ends[count - 2] if count > 1 else 0
        return start, ends[count - 1]

    def discard_history(self) -> None:
        """Make this request start a branch, because its history cannot be rendered after the known tokens."""
        self.parent = None
        self.difference = "the chat template does not show this history after the sampled tokens"

    def check_prompt(self, token_ids: list[int]) -> None:
        """Raise ValueError if the rendered prompt leaves no token for an answer."""
        limit = self._get_sequence_limit(token_ids)
        self.session.prompt_error = ""
        if len(token_ids) >= limit:
            self.session.prompt_error = (
                f"This model's maximum context length is {limit} tokens. However, the messages resulted in "
                f"{len(token_ids)} tokens. Please reduce the length of the messages."
            )
            raise ValueError(self.session.prompt_error)

    def _get_sequence_limit(self, prompt_ids: list[int]) -> int:
        """Return the token limit of the path: max_model_len or, if less, its first prompt plus sampling.max_tokens."""
        path_limit = self._count_tokens_of_first_prompt(prompt_ids) + self.session.sampling.max_tokens
        return min(self.session.limits.max_model_len, path_limit)

    def _count_tokens_of_first_prompt(self, prompt_ids: list[int]) -> int:
        return len(self.parent.path[0].request.prompt_ids if self.parent else prompt_ids)

    def start_sampling(
        self, request_id: str, prompt_ids: list[int], max_tokens: int, is_constrained: bool = False
    ) -> Sampling:
        """Return the policy's sampling settings for the answers, and find the `earlier` request if this is a retry.
        max_tokens: what the client asks for."""
        session = self.session
        history = self.parent.token_ids if self.parent else []
        if prompt_ids[: len(history)] != history:  # e.g. truncated by the client's settings
            self.discard_history()
        self.id, self.prompt_ids, self.is_constrained = request_id, prompt_ids, is_constrained
        self.earlier = session.find_undelivered(self)
        budget = self._get_sequence_limit(prompt_ids) - len(prompt_ids)
        self.token_limit = max(1, min(budget, session.limits.max_tokens_per_turn or budget))
        self.seed = session.derive_seed(session.count_sampling(prompt_ids))
        return replace(session.sampling, max_tokens=max(1, min(max_tokens, self.token_limit)), seed=self.seed)

    def record_answers(self, answers: list[Answer], outputs: object) -> None:
        """Record the answers before the client receives them."""
        if self.earlier is not None:
            self.session.requests.remove(self.earlier)
            for answer, earlier_answer in zip(answers, self.earlier.answers, strict=False):
                answer.reward = earlier_answer.reward
        self.answers, self.outputs = answers, outputs
        self.session.requests.append(self)
        self.session.is_refused = False

    def record_engine_error(self, error: Exception) -> None:
        """Record that the engine failed, which is not a failure of the agent."""
        self.session.engine_error = error
        self.session.engine_failed.set()

    def finish(self, is_delivered: bool) -> None:
        """Finish the request. If its answer was not delivered, a retry is sampled with the same seed."""
        self.is_delivered = bool(self.is_delivered or (is_delivered and self.answers))
        if not self.is_delivered and self.prompt_ids:
            self.session.count_sampling(self.prompt_ids, -1)


@dataclass(eq=False)
class Answer:
    """Sampled answer: a node of the session's forest."""

    request: Request
    completion: Completion
    text: str  # decoded tokens
    content: str  # text of the message, without reasoning and tool calls
    tool_calls: Sequence[tuple[str, str]] = ()  # (name, arguments as JSON)
    reward: float | None = None  # sum of the rewards for this answer alone; None: no reward was given
    marks: Marks = ()  # see Turn

    def add_reward(self, reward: float) -> None:
        self.reward = reward + (self.reward or 0.0)

    @property
    def parent(self) -> Answer | None:
        """The answer that the prompt continues."""
        return self.request.parent

    @property
    def chat_keys(self) -> list[MessageKey]:
        """Keys of the chat up to and including this answer."""
        return [*self.request.keys, make_answer_key(self.content, self.tool_calls)]

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the session, not the client's max_tokens, truncated the answer."""
        ids, reason = self.completion.token_ids, self.completion.stop_reason
        return reason is StopReason.LENGTH and len(ids) >= self.request.token_limit

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt and of the answer."""
        return [*self.request.prompt_ids, *self.completion.token_ids]

    @property
    def path(self) -> list[Answer]:
        """Answers from the root to this one."""
        path = [self]
        while parent := path[-1].parent:
            path.append(parent)
        return path[::-1]


def list_new_messages(request: Request, parent: Answer | None) -> list[Message]:
    """Return the messages of a request after the answer `parent`, which the request continues. None: all messages."""
    keys = request.keys[len(parent.request.keys) + 1 :] if parent else request.keys
    messages = [Message(role=key.role, content=key.text) for key in keys]
    for message, key in zip(messages, keys, strict=True):
        if key.images:
            message["images"] = [request.session.encoded_images[digest] for digest in key.images]
    return messages


CURRENT_REQUEST: ContextVar[Request | None] = ContextVar("current_request", default=None)
"""The request that the current asyncio task serves."""
