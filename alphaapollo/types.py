"""Dataclasses shared by all packages. Read this file first.

    parquet row -> Prompt -> TrajectoryGroup of n Trajectory -> Row (tokens to train on) -> metrics
                             Trajectory = Turns (prompts and sampled tokens of the engine) + Score

This module does not import torch: the driver, environments and graders share these types. For compact pickles, token
ids, masks and log-probs are lists in the sending process and `array.array` in the receiving one. Frozen classes have no
slots, because unpickling them would be slow.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NotRequired, TypedDict

import numpy as np


class Message(TypedDict):
    """One chat message, e.g. `{"role": "user", "content": "2+2=?"}`."""

    role: str
    content: str
    name: NotRequired[str]  # role tool: name of the tool


@dataclass(frozen=True)
class Prompt:
    """One task, read from one data row.

    Example: `Prompt(id=17, data_source="openai/gsm8k", content=[{"role": "user", ...}], ground_truth="14")`.
    """

    id: int  # position of the row in the data files, stable over epochs and restarts
    data_source: str  # selects the reward function
    content: list[Message] | str  # a chat for the chat template, or text to continue
    ground_truth: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    env_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one completion."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 = all
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # a stop token is part of the completion and trained on


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
    """Sampled tokens and their log-probs, after temperature and before top-p and top-k."""

    token_ids: Sequence[int]  # [T]
    logprobs: Sequence[float]  # [T]
    stop_reason: StopReason
    weight_version: int  # weight version at the end of the completion
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    earlier_versions: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) of earlier parts, if weights changed during sampling."""
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [prompt + T - 1, layers, k]: experts of every token but the last, with rollout.router_replay.
    Moved to the rows (rollout/context.py)."""

    def __reduce__(self) -> tuple[Any, ...]:
        small = (self.stop_reason, self.weight_version, self.num_cached_tokens, self.earlier_versions)
        compact = (array("i", self.token_ids), array("d", self.logprobs))
        return Completion, (*compact, *small, self.routed_experts)

    @property
    def weight_versions(self) -> list[int]:
        """Weight version of each token [T]."""
        earlier = [version for version, count in self.earlier_versions for _ in range(count)]
        return [*earlier, *[self.weight_version] * (len(self.token_ids) - len(earlier))][: len(self.token_ids)]


class Outcome(StrEnum):
    """Outcome of an episode. The last two have no reward: they are masked, never scored 0."""

    SCORED = "scored"
    WRONG_FORMAT = "wrong_format"  # scored, but no answer could be parsed
    GRADER_FAILED = "grader_failed"
    ENVIRONMENT_FAILED = "environment_failed"

    @property
    def failed(self) -> bool:
        return self in (Outcome.GRADER_FAILED, Outcome.ENVIRONMENT_FAILED)


@dataclass(frozen=True)
class Score:
    """Result of a reward function. `reason` explains a failure or a wrong format."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.SCORED
    reason: str = ""

    @property
    def accuracy(self) -> float:
        """Component named accuracy, or the reward if there is none."""
        return self.components.get("accuracy", self.reward)

    def component(self, name: str) -> float:
        """Return a component; NaN if missing. A reward of 0 without components, e.g. of an episode ended by a limit,
        has 0 in each."""
        if not self.components and self.reward == 0:
            return 0.0
        return self.components.get(name, math.nan)


class EpisodeEnd(StrEnum):
    """Reason why an episode ended."""

    DONE = "done"  # by the environment
    TOKEN_LIMIT = "token_limit"  # response budget used up, or last turn truncated by its own limit
    TURN_LIMIT = "turn_limit"
    TIME_LIMIT = "time_limit"
    PROMPT_LIMIT = "prompt_limit"  # an observation was too long for a prompt
    ENVIRONMENT_FAILED = "environment_failed"


@dataclass(slots=True)
class Turn:
    """One action of the model, with the context before it.

    `context_ids`: tokens added since the last action (turn 0: the rendered prompt), so an append-context trajectory is
    context_0 + action_0 + context_1 + action_1 + ...
    """

    context_ids: Sequence[int]
    completion: Completion
    text: str  # decoded action, for people, graders and environments
    reward: float = 0.0  # step reward of the environment; the final score is in Trajectory.score
    valid: bool = True  # false: the environment could not parse an action
    info: dict[str, Any] = field(default_factory=dict)
    observation: list[Message] | None = None  # messages of the environment; None after the last turn

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (self.text, self.reward, self.valid, self.info, self.observation)
        return Turn, (array("i", self.context_ids), self.completion, *rest)


@dataclass(frozen=True)
class EpisodeTurn:
    """A turn as seen by a reward function; fields as in Turn. While the environment processes the last turn, only its
    text is set."""

    text: str
    observation: list[Message] | None = None
    reward: float = 0.0
    valid: bool = True
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """An episode as seen by a reward function with a parameter `trajectory`: without tokens.

    Example: `Episode("so 14", [EpisodeTurn("<python_code>7+7</python_code>", [{"role": "user", ...}]),
    EpisodeTurn("so 14")])`.
    """

    text: str  # the `completion`; empty if a limit ended the episode before an answer
    turns: list[EpisodeTurn]


@dataclass(slots=True)
class Row:
    """One token sequence to train on: a whole trajectory (append context) or one turn of it (memory context)."""

    token_ids: Sequence[int]  # [T]
    action_mask: Sequence[int]  # [T] 1 if the model sampled the token
    logprobs: Sequence[float]  # [T] log-probs of the engine, 0.0 outside the mask
    turn_ends: list[int]  # position of the last action token of each turn
    first_turn: int = 0  # index of its first turn in Trajectory.turns
    weight_versions: Sequence[int] = field(default_factory=list)  # of its action tokens, in order
    routed_experts: np.ndarray | None = None  # [T, layers, k], see Completion

    def __reduce__(self) -> tuple[Any, ...]:
        compact = (array("i", self.token_ids), array("b", self.action_mask), array("d", self.logprobs))
        of_turns = (self.turn_ends, self.first_turn, array("i", self.weight_versions))
        return Row, (*compact, *of_turns, self.routed_experts)

    @property
    def response_start(self) -> int:
        """Position of the first action token; earlier tokens are the prompt."""
        return bytes(self.action_mask).index(1)  # ten times faster than searching an array


@dataclass(slots=True)
class Trajectory:
    """One episode of one prompt."""

    prompt_id: int
    sample: int  # 0 .. n-1 within its group
    turns: list[Turn]
    rows: list[Row]
    score: Score
    end: EpisodeEnd
    seconds: float = 0.0
    first_observation: list[Message] | str | None = None  # None: the environment failed before it

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def response_length(self) -> int:
        """Used part of the response budget: sampled tokens and, in append context, observation tokens between them."""
        return sum(len(row.token_ids) - row.response_start for row in self.rows)

    @property
    def prompt_lengths(self) -> list[int]:
        """Length of the engine's prompt of each turn, in tokens."""
        ends = [end for row in self.rows for end in row.turn_ends]
        return [end + 1 - len(turn.completion.token_ids) for end, turn in zip(ends, self.turns, strict=False)]

    @property
    def reward(self) -> float:
        """Total reward: score and step rewards. NaN if failed."""
        return self.score.reward + sum(turn.reward for turn in self.turns)

    @property
    def accuracy(self) -> float:
        """Component named accuracy, or the reward if there is none."""
        return self.score.components.get("accuracy", self.reward)

    @property
    def truncated(self) -> bool:
        """Whether a token limit ended the episode."""
        return self.end is EpisodeEnd.TOKEN_LIMIT


@dataclass(slots=True)
class TrajectoryGroup:
    """The n trajectories of one prompt; unit of transfer from rollout workers to the driver."""

    prompt: Prompt
    trajectories: list[Trajectory]
    baseline: Trajectory | None = None  # greedy trajectory, if requested; never trained on


@dataclass(frozen=True)
class GroupRequest:
    """Request of the driver to a rollout worker: n episodes of one prompt.

    All randomness depends only on (seed, draw, prompt.id, sample, turn).
    """

    prompt: Prompt
    num_samples: int
    sampling: Sampling  # max_tokens: response budget of an episode; seed: of the run
    draw: int  # position in the stream of training prompts; distinguishes visits to one prompt
    validate: bool = False
    greedy_baseline: bool = False  # play one more episode, greedily


@dataclass(frozen=True)
class WeightUpdate:
    """Weights that the trainer published.

    folder: name in each node's shared memory (weight_sync/transport.py); empty when vLLM's own transfer (CUDA IPC,
    NCCL) has already carried the tensors.
    """

    version: int
    digest: str  # of the sent tensors (weight_sync/digest.py)
    folder: str = ""


@dataclass(frozen=True)
class WeightReceipt:
    """Weights that an engine holds after a publish. A difference to the update stops the run."""

    version: int
    digest: str
