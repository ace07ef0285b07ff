"""What crosses rooms. Read this file first: it is the vocabulary of the whole system.

    parquet row -> Prompt -> TrajectoryGroup of n Trajectory -> Row (tokens to train on) -> metrics
                             Trajectory = Turns (what the engine saw and sampled) + Score (what it was worth)

No torch here: the driver, the environments and the graders share these types. What is sampled travels compactly:
token ids, masks and log-probs, lists where they are made, are `array.array` of the same numbers where they arrive. And
no frozen class has slots: Python would unpickle it by a loop over its fields.
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
    name: NotRequired[str]  # role tool: the tool that answers


@dataclass(frozen=True)
class Prompt:
    """One task, read from one data row.

    Example: `Prompt(id=17, data_source="openai/gsm8k", content=[{"role": "user", ...}], ground_truth="14")`.
    """

    id: int  # the row's position in the data files: stable over epochs and restarts
    data_source: str  # chooses the reward function
    content: list[Message] | str  # a chat, rendered by the chat template; or text that the model continues as it is
    ground_truth: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    env_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How an engine samples one completion."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 = all
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # the stop token is part of the completion: it is trained on


@dataclass(frozen=True)
class Asked:
    """One request to a model."""

    token_ids: list[int]
    sampling: Sampling


class StopReason(StrEnum):
    """Why the engine stopped sampling one completion."""

    STOP = "stop"  # the model ended its text
    LENGTH = "length"  # max_tokens reached


@dataclass(frozen=True)
class Completion:
    """What an engine returns: tokens and their log-probs, after temperature and before top-p and top-k."""

    token_ids: Sequence[int]  # [T]
    logprobs: Sequence[float]  # [T]
    stop_reason: StopReason
    weight_version: int  # the publish that the engine held at its end
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    earlier_versions: tuple[tuple[int, int], ...] = ()
    """(publish, tokens) of the tokens before those of `weight_version`, where weights changed under way."""
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [prompt + T - 1, layers, k]: the experts that each token, but for the last, was sent to; of a
    mixture of experts, where asked for. Rows take it over (rollout/context.py)."""

    def __reduce__(self) -> tuple[Any, ...]:
        small = (self.stop_reason, self.weight_version, self.num_cached_tokens, self.earlier_versions)
        compact = (array("i", self.token_ids), array("d", self.logprobs))
        return Completion, (*compact, *small, self.routed_experts)

    @property
    def weight_versions(self) -> list[int]:
        """The publish that sampled each token. [T]"""
        earlier = [version for version, count in self.earlier_versions for _ in range(count)]
        return [*earlier, *[self.weight_version] * (len(self.token_ids) - len(earlier))][: len(self.token_ids)]


class Outcome(StrEnum):
    """The four outcomes that are never mixed up. The last two carry no reward: they are masked, not scored 0."""

    SCORED = "scored"
    WRONG_FORMAT = "wrong_format"  # scored too, but the answer could not be read
    GRADER_FAILED = "grader_failed"
    ENVIRONMENT_FAILED = "environment_failed"

    @property
    def failed(self) -> bool:
        return self in (Outcome.GRADER_FAILED, Outcome.ENVIRONMENT_FAILED)


@dataclass(frozen=True)
class Score:
    """What a reward function said. `reason` explains a failure or a wrong format."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.SCORED
    reason: str = ""

    @property
    def accuracy(self) -> float:
        """The component named accuracy; a reward function without one is its own accuracy."""
        return self.components.get("accuracy", self.reward)

    def component(self, name: str) -> float:
        """A named part of the reward; nan where it is missing. A score of 0 without any parts, as of an episode that a
        limit ended, has 0 of each."""
        if not self.components and self.reward == 0:
            return 0.0
        return self.components.get(name, math.nan)


class EpisodeEnd(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment said so
    TOKEN_LIMIT = "token_limit"  # the response budget is spent, or the last turn was cut by its own limit
    TURN_LIMIT = "turn_limit"
    TIME_LIMIT = "time_limit"
    PROMPT_LIMIT = "prompt_limit"  # the environment asks more than a prompt may hold
    ENVIRONMENT_FAILED = "environment_failed"


@dataclass(slots=True)
class Turn:
    """One action of the model.

    `context_ids` are the tokens that the environment added since the last action (turn 0: the rendered prompt), so an
    append-context trajectory is context_0 + action_0 + context_1 + action_1 + ...
    """

    context_ids: Sequence[int]
    completion: Completion
    text: str  # the action decoded, for people, graders and environments; never encoded again
    reward: float = 0.0  # the environment's own step reward; the outcome stands in Trajectory.score
    valid: bool = True  # false: the environment could not read an action in the text
    info: dict[str, Any] = field(default_factory=dict)
    observation: list[Message] | None = None  # what the environment answered; None: nothing, the episode was over

    def __reduce__(self) -> tuple[Any, ...]:
        said = (self.text, self.reward, self.valid, self.info, self.observation)
        return Turn, (array("i", self.context_ids), self.completion, *said)


@dataclass(frozen=True)
class EpisodeTurn:
    """A turn as a reward function sees it; the fields are those of Turn. Of the last one, while the environment still
    answers it, there is the text alone."""

    text: str
    observation: list[Message] | None = None
    reward: float = 0.0
    valid: bool = True
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """An episode as a reward function with a parameter `trajectory` sees it: without tokens.

    Example: `Episode("so 14", [EpisodeTurn("<python_code>7+7</python_code>", [{"role": "user", ...}]),
    EpisodeTurn("so 14")])`.
    """

    text: str  # what a function of `completion` gets; empty where a limit came before the answer
    turns: list[EpisodeTurn]


@dataclass(slots=True)
class Row:
    """One token sequence to train on: a whole trajectory (append context) or one turn of it (memory context)."""

    token_ids: Sequence[int]  # [T]
    action_mask: Sequence[int]  # [T] 1 where the model sampled the token
    logprobs: Sequence[float]  # [T] the engine's log-probs, 0.0 off the mask
    turn_ends: list[int]  # position of the last action token of each of its turns
    first_turn: int = 0  # its first turn's index in Trajectory.turns
    weight_versions: Sequence[int] = field(default_factory=list)  # of its action tokens, in order: who sampled them
    routed_experts: np.ndarray | None = None  # [T, layers, k], as the completions'

    def __reduce__(self) -> tuple[Any, ...]:
        compact = (array("i", self.token_ids), array("b", self.action_mask), array("d", self.logprobs))
        of_turns = (self.turn_ends, self.first_turn, array("i", self.weight_versions))
        return Row, (*compact, *of_turns, self.routed_experts)

    @property
    def response_start(self) -> int:
        """Position of the first action token: what comes before is prompt."""
        return bytes(self.action_mask).index(1)  # an array would be searched ten times as long


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
    asked: list[Message] | str | None = None  # the environment's first observation; None: there was none

    @property
    def num_tokens(self) -> int:
        """Tokens that the model sampled."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def response_length(self) -> int:
        """Tokens of the response budget that it has spent: what the model sampled and, in append context, what the
        environment said in between."""
        return sum(len(row.token_ids) - row.response_start for row in self.rows)

    @property
    def shown_lengths(self) -> list[int]:
        """Tokens of the whole prompt that the engine was shown, a turn."""
        ends = [end for row in self.rows for end in row.turn_ends]
        return [end + 1 - len(turn.completion.token_ids) for end, turn in zip(ends, self.turns, strict=False)]

    @property
    def reward(self) -> float:
        """What it was worth in all: the outcome and the environment's step rewards. nan: it failed."""
        return self.score.reward + sum(turn.reward for turn in self.turns)

    @property
    def accuracy(self) -> float:
        """The component named accuracy; where there is none, the reward."""
        return self.score.components.get("accuracy", self.reward)

    @property
    def truncated(self) -> bool:
        """Cut by a limit of tokens before the model ended its text."""
        return self.end is EpisodeEnd.TOKEN_LIMIT


@dataclass(slots=True)
class TrajectoryGroup:
    """The n trajectories of one prompt; the unit that travels from the rollout workers to the driver."""

    prompt: Prompt
    trajectories: list[Trajectory]
    baseline: Trajectory | None = None  # the greedy one, where it was asked for: compared with, never trained on


@dataclass(frozen=True)
class GroupRequest:
    """What the driver asks of a rollout worker: n episodes of one prompt.

    Every random draw below it is a function of (seed, draw, prompt.id, sample, turn) and of nothing else.
    """

    prompt: Prompt
    num_samples: int
    sampling: Sampling  # max_tokens = the whole response budget; its seed is the run's
    draw: int  # position in the stream of training prompts: tells apart two visits to one prompt
    validate: bool = False
    greedy_baseline: bool = False  # play one more episode, greedily


@dataclass(frozen=True)
class WeightUpdate:
    """Weights that the trainer published.

    folder: name in each node's shared memory (weight_sync/transport.py); empty when vLLM's own transfer (CUDA IPC,
    NCCL) has already carried the tensors.
    """

    version: int
    digest: str  # of the tensors sent: see weight_sync/digest.py
    folder: str = ""


@dataclass(frozen=True)
class WeightReceipt:
    """What an engine says it holds after a publish; compared with the update, and any difference stops the run."""

    version: int
    digest: str
