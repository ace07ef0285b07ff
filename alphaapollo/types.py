"""Dataclasses shared by all packages. Read this file first.

    parquet row -> Prompt -> TrajectoryGroup of n Trajectory -> Row (tokens to train on) -> metrics
                             Trajectory = Turns (prompts and sampled tokens of the engine) + Score

This module does not import torch: the driver, environments and graders share these types. For compact pickles, token
ids, masks and log-probs are lists in the sender, arrays in the receiver. Slots in frozen classes would slow unpickling.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from alphaapollo.utils.json_types import IMAGE_MARK as IMAGE_MARK
from alphaapollo.utils.json_types import ChatMessage as ChatMessage
from alphaapollo.utils.json_types import EncodedImage as EncodedImage
from alphaapollo.utils.json_types import Json as Json
from alphaapollo.utils.json_types import JsonObject as JsonObject
from alphaapollo.utils.json_types import Message as Message
from alphaapollo.utils.json_types import ToolCall as ToolCall


@dataclass(frozen=True)
class ImageInput:
    """Image as input of a model, prepared by the model's processor. Engine and trainer get the same tensors.

    Placeholder tokens in the prompt mark the image's position. The model replaces the embedding of each placeholder by
    one image feature. Two inputs with the same tensors are equal, even if the image was prepared twice.
    """

    tensors: dict[str, np.ndarray] = field(compare=False)
    """Arguments of the model's `get_image_features`. Arrays of several images are concatenated on dimension 0."""
    token_ids: Sequence[int] = field(compare=False)  # tokens in a prompt: placeholders, and possibly others around them
    placeholder_id: int = field(compare=False)  # id of the placeholder token
    digest: str  # digest of the tensors
    grid: tuple[int, int] | None = field(default=None, compare=False)  # (rows, columns) of the placeholders, for M-RoPE

    @cached_property
    def num_placeholders(self) -> int:
        """Number of placeholder tokens, which is the number of image features."""
        return sum(token == self.placeholder_id for token in self.token_ids)


@dataclass(frozen=True)
class Prompt:
    """Task for the model, read from one data row.

    Example: `Prompt(id=17, data_source="openai/gsm8k", content=[{"role": "user", ...}], ground_truth="14")`.
    """

    id: int  # position of the row in the data files, stable over epochs and restarts
    data_source: str  # selects the reward function
    content: list[Message] | str  # chat for the chat template, or text to continue
    ground_truth: Json = None  # right answer as in the data file: text, number, list, dict, date, ...; None: unknown
    extra_info: JsonObject = field(default_factory=dict)  # the column extra_info, and columns without a field here
    env_kwargs: JsonObject = field(default_factory=dict)  # for the environment
    location: str = field(default="", compare=False)  # e.g. "train.parquet, row 17", for messages
    file: int = 0  # index in data.train_files
    template_arguments: JsonObject = field(default_factory=dict)  # the row's tools and chat_template_kwargs

    @property
    def ground_truth_in_files(self) -> Json:
        """The ground truth as a JSON value, which files can contain: dates, decimals and bytes become text."""
        truth = self.ground_truth
        text = json.dumps(truth, default=lambda x: x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x))
        return str(truth) if truth != truth else json.loads(text)  # truth != truth: NaN

    @property
    def ground_truth_text(self) -> str | None:
        """The ground truth for judges and digests: text as it is, lists and dicts as JSON, other values converted."""
        truth = self.ground_truth_in_files
        shown = json.dumps(truth, ensure_ascii=False) if isinstance(truth, list | dict) else str(truth)
        return None if truth is None else shown


@dataclass(frozen=True)
class Adapter:
    """A version of a LoRA adapter: a folder in peft's format. In a run, no two folders have the same version."""

    folder: str
    version: int


BASE_MODEL = Adapter("", 0)  # the model without an adapter


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one completion."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 = all tokens
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # a sampled stop token is part of the completion and is trained on
    stop: tuple[str, ...] = ()  # strings that end a completion, whose last token is the one that completes the string
    includes_stop: bool = False  # whether the stop string is in the text of a completion, not only in its tokens
    adapter: Adapter | None = None  # adapter to sample with; None: the engine's newest weights
    cache_owner: str = ""  # requests of different owners share no cached prefixes
    min_p: float = 0.0  # smallest probability that is kept, as a share of the largest one
    returns_kept_tokens: bool = False  # return the tokens kept by top-p, top-k and min-p, and log-probs among them


@dataclass(frozen=True)
class SamplingRequest:
    """A prompt with its sampling parameters."""

    token_ids: list[int]
    sampling: Sampling


class StopReason(StrEnum):
    """Reason why an engine stopped sampling."""

    STOP = "stop"  # stop token sampled
    LENGTH = "length"  # max_tokens reached


@dataclass(frozen=True)
class Completion:
    """Tokens sampled by an engine, with log-probs as in Engine.generate."""

    token_ids: Sequence[int]  # [T]
    logprobs: Sequence[float]  # [T]
    stop_reason: StopReason
    weight_version: int  # weight version at the end of the completion
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    earlier_version_token_counts: tuple[tuple[int, int], ...] = ()
    """(weight version, number of tokens) of earlier parts, if weights changed during sampling."""
    columns: dict[str, Any] = field(default_factory=dict)  # [prompt + T - 1, ...], all tokens but the last: Row.columns

    def __reduce__(self) -> tuple[object, ...]:
        small = (self.stop_reason, self.weight_version, self.num_cached_tokens, self.earlier_version_token_counts)
        compact = (array("i", self.token_ids), array("d", self.logprobs), *small, self.columns)
        return Completion, compact, {"logprob_sum": self.logprob_sum}

    @cached_property
    def logprob_sum(self) -> float:
        """Sum of the log-probs, which the sending process computes."""
        return float(np.add.reduce(self.logprobs))

    @property
    def weight_versions(self) -> list[tuple[int, int]]:
        """(weight version, number of tokens) of each part of the completion, in order."""
        parts, num_left = [], len(self.token_ids)
        for version, count in (*self.earlier_version_token_counts, (self.weight_version, num_left)):
            parts.append((version, min(count, num_left)))  # a truncated completion may lack the last parts
            num_left -= min(count, num_left)
        return [(version, count) for version, count in parts if count]


class Outcome(StrEnum):
    """Outcome of an episode. A failed episode has no reward: it is excluded from training, never scored 0."""

    SCORED = "scored"
    WRONG_FORMAT = "wrong_format"  # scored, but no answer could be parsed
    GRADER_FAILED = "grader_failed"
    ENVIRONMENT_FAILED = "environment_failed"

    @property
    def failed(self) -> bool:  # the grader or the environment failed
        return self in FAILED_OUTCOMES


FAILED_OUTCOMES = (Outcome.GRADER_FAILED, Outcome.ENVIRONMENT_FAILED)
DERIVED = -math.inf  # default of Score.accuracy: derive it from components and reward


@dataclass(frozen=True)
class JudgeUsage:
    """Judgements by a language model that a score needed."""

    judgements: int = 0
    cached: int = 0  # number of these that came from the cache, or from an equal judgement in flight
    seconds: float = 0.0  # sum of the times until the verdicts, including the wait for a connection

    def __add__(self, other: JudgeUsage) -> JudgeUsage:
        return JudgeUsage(self.judgements + other.judgements, self.cached + other.cached, self.seconds + other.seconds)


@dataclass(frozen=True)
class Score:
    """Result of a reward function. `reason` explains a failure or a wrong format."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)  # named parts of the reward, for metrics and filters
    outcome: Outcome = Outcome.SCORED
    reason: str = ""
    judge_usage: JudgeUsage = field(default=JudgeUsage(), compare=False)
    is_limit: bool = False  # a limit ended the episode before an answer; missing components are 0
    skipped_components: tuple[str, ...] = ()  # names of components that are left out because they are NaN or infinite
    accuracy: float | None = field(default=DERIVED, compare=False)  # 1: right, 0: wrong; None: unknown, e.g. of a sum

    def __post_init__(self) -> None:
        if self.accuracy == DERIVED:  # the component, else a reward of 0 or 1 without components, else 0 after a limit
            binary = None if self.components or self.reward not in (0, 1) else self.reward
            derived = self.components.get("accuracy", 0.0 if self.is_limit and binary is None else binary)
            object.__setattr__(self, "accuracy", None if self.outcome.failed else derived)

    def component(self, name: str) -> float:
        """Return a component. A missing one is 0 with `is_limit` or for a reward of 0 without components, else NaN."""
        if name in self.components:
            return self.components[name]
        return 0.0 if self.is_limit or (not self.components and self.reward == 0) else math.nan

    def add_turn_rewards(self, rewards: Sequence[float]) -> Score:
        """Add rewards of turns. The accuracy stays known with components, after a limit, or if all rewards are 0."""
        is_known = self.components or self.is_limit or not any(rewards)
        return replace(self, reward=self.reward + sum(rewards), accuracy=self.accuracy if is_known else None)


class EpisodeEnd(StrEnum):
    """Reason why an episode ended."""

    DONE = "done"  # ended by the environment
    TOKEN_LIMIT = "token_limit"  # the budget is used up, a later prompt is too long, or the last turn was cut
    TURN_LIMIT = "turn_limit"
    TIME_LIMIT = "time_limit"
    PROMPT_LIMIT = "prompt_limit"  # the first prompt is too long
    ENVIRONMENT_FAILED = "environment_failed"


@dataclass(slots=True)
class Turn:
    """One action of the model, with the context before the action.

    `context_ids` are the tokens added since the last action (turn 0: the rendered prompt). If all turns are one token
    sequence, it is context_0 + action_0 + context_1 + action_1 + ...
    """

    context_ids: Sequence[int]
    completion: Completion
    text: str  # decoded action, for display, graders and environments
    reward: float = 0.0  # step reward of the environment; the final score is in Trajectory.score
    valid: bool = True  # False: the environment could not parse the action
    info: JsonObject = field(default_factory=dict)
    observation: list[Message] | None = None  # messages of the environment; None after the last turn
    context_images: tuple[ImageInput, ...] = ()  # images whose placeholders are in context_ids, in order
    answer_number: int = 0  # for agents: position in the order of sampling (Trajectory.turns has the order of rows)
    raw_text: str = ""  # text of a truncated action with its special tokens, for display
    marks: Sequence[tuple[int, str]] = ()  # (position, mark): marks of thoughts that `text` lacks (utils/thoughts.py)

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.text, self.reward, self.valid, self.info, self.observation, self.context_images)
        more_fields = (self.answer_number, self.raw_text, self.marks)
        return Turn, (array("i", self.context_ids), self.completion, *fields, *more_fields)


@dataclass(frozen=True)
class EpisodeTurn:
    """Turn of an episode as a reward function receives it. The last one has only `text` and `token_ids`."""

    text: str
    observation: list[Message] | None = None
    reward: float = 0.0
    valid: bool = True
    info: JsonObject = field(default_factory=dict)
    token_ids: Sequence[int] = ()  # sampled tokens; empty for a text that was not sampled, e.g. a trial answer


@dataclass(frozen=True)
class Episode:
    """Episode as a reward function receives it in its parameter `trajectory`.

    Example: `Episode("14", [EpisodeTurn("<python_code>7+7</python_code>", [{"role": ...}]), EpisodeTurn("14")])`.
    """

    text: str  # same as the parameter `completion`; empty if a limit ended the episode before an answer
    turns: list[EpisodeTurn]
    prompt_text: str = ""  # rendered prompt; only for functions of OpenRLHF
    step: int = 0  # version of the weights that sampled the last turn: the number of weight syncs before it
    max_steps: int = 0  # iterations of the run; 0 outside training
    marked_text: str = ""  # `text` with the marks of thoughts (Turn.marks) inserted, for the built-in graders


LONGER_PROMPT = "longer_prompt_ids"
"""Key of Row.columns: token ids of a longer prompt, which a self-teacher reads before the same response."""


@dataclass(slots=True)
class Row:
    """Token sequence to train on: a complete trajectory, or one turn if each turn has a new prompt (memory context)."""

    token_ids: Sequence[int]  # [T]
    action_mask: Sequence[int]  # [T] 1 if the model sampled the token
    logprobs: Sequence[float]  # [T] log-probs of the engine, 0.0 off the mask; NaN: no engine sampled the token
    turn_ends: list[int]  # position of the last action token of each turn
    first_turn: int = 0  # index in Trajectory.turns of the first turn of the row
    weight_versions: list[tuple[int, int]] = field(default_factory=list)  # (version, number of action tokens) in order
    images: Sequence[ImageInput] = ()  # images whose placeholders are in token_ids, in order
    columns: dict[str, Any] = field(default_factory=dict)
    """Named inputs of optional features. An array [T, ...] has one entry per token; other values are one per row."""
    num_earlier_tokens: int = 0
    """Number of tokens before the row's response that also count towards data.max_response_length: for agents, earlier
    answers and observations of the path; in memory context, earlier turns."""
    temperature: float | None = None  # of sampling and of `logprobs`; 0: sampling is greedy, `logprobs` are at 1

    def __reduce__(self) -> tuple[object, ...]:
        compact = (array("i", self.token_ids), array("b", self.action_mask), array("d", self.logprobs))
        fields = (self.turn_ends, self.first_turn, self.weight_versions, self.images, self.columns)
        return Row, (*compact, *fields, self.num_earlier_tokens, self.temperature)

    @property
    def response_start(self) -> int:
        """Position of the first action token; earlier tokens are the prompt."""
        return bytes(self.action_mask).index(1)  # ten times faster than searching an array

    @property
    def response_length(self) -> int:
        """Tokens up to the end of the row that count towards data.max_response_length."""
        return len(self.token_ids) - self.response_start + self.num_earlier_tokens

    @property
    def packed_length(self) -> int:
        """Number of tokens of the response and of the row's prompt or, if it is longer, of LONGER_PROMPT."""
        longer = self.columns.get(LONGER_PROMPT)
        return len(self.token_ids) + (0 if longer is None else max(0, len(longer) - self.response_start))


@dataclass(slots=True)
class Trajectory:
    """Episode of one prompt: turns, token sequences to train on (rows, in no particular order), and score."""

    prompt_id: int
    sample: int  # 0 .. n-1 within its group
    turns: list[Turn]
    rows: list[Row]
    score: Score
    end: EpisodeEnd
    seconds: float = 0.0
    first_observation: list[Message] | str | None = None  # None: the environment failed before the first observation

    @property
    def last_turn(self) -> Turn | None:
        """Turn with the last answer; None without turns. An agent's turns after it are not trained on."""
        return next((turn for turn in self.turns if "last_answer" in turn.info), self.turns[-1] if self.turns else None)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def response_length(self) -> int:
        """Number of tokens that data.max_response_length limits: for an agent, those of its longest path."""
        return max((row.response_length for row in self.rows), default=0)

    @property
    def prompt_lengths(self) -> list[int]:
        """Number of tokens in the prompt of each turn."""
        ends = [end for row in self.rows for end in row.turn_ends]
        return [end + 1 - len(turn.completion.token_ids) for end, turn in zip(ends, self.turns, strict=False)]

    @property
    def reward(self) -> float:
        """Total reward: score plus step rewards. NaN for a failed episode."""
        return self.score.reward + sum(turn.reward for turn in self.turns)

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the episode; None if it is unknown."""
        return self.score.add_turn_rewards([turn.reward for turn in self.turns]).accuracy

    @property
    def truncated(self) -> bool:
        """Whether a token limit ended the episode."""
        return self.end is EpisodeEnd.TOKEN_LIMIT


@dataclass(slots=True)
class TrajectoryGroup:
    """The n trajectories of one prompt, sent together from a rollout worker to the driver."""

    prompt: Prompt
    trajectories: list[Trajectory]
    baseline: Trajectory | None = None  # greedy trajectory, if requested; not trained on


@dataclass(frozen=True)
class GroupRequest:
    """Request from the driver to a rollout worker for n episodes of one prompt. All randomness depends only on the run
    seed, stream_position, prompt.id, sample and turn."""

    prompt: Prompt
    num_samples: int
    sampling: Sampling  # max_tokens is the response budget of an episode, seed is the run seed
    stream_position: int  # position in the stream of training prompts; differs when a prompt is repeated
    validate: bool = False
    greedy_baseline: bool = False  # also run one episode with greedy sampling
    environment: bytes = b""  # pickled factory of the environments; empty: use env.env_name
