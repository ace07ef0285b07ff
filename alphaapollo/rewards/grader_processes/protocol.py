"""Encode and decode the messages on the pipes of a grader process.

A request is a pickled Request, or the pickled name of a data source, whose grader the process then imports. A reply is
JSON; the first one is a LoadReport. If the reward function is async, requests overlap, and an empty reply is a timeout.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from alphaapollo.types import Episode, EpisodeTurn, Outcome, Prompt, Score, Turn
from alphaapollo.utils.json_types import to_json_value

NOT_JUDGED: Mapping[str, Score] = MappingProxyType({})


@dataclass(frozen=True)
class LoadReport:
    """Functions that a grader process has loaded."""

    error: str = ""  # why they cannot be loaded
    takes_turns: bool = False  # whether one of them takes a trajectory
    is_async: bool = False  # whether requests may overlap
    columns: Sequence[str] = ()  # columns of the data that the user's function requires
    takes_prompt_text: bool = False


@dataclass(frozen=True)
class Request:
    """Request to grade a completion."""

    prompt: Prompt
    completion: str | None  # None: the answer that the built-in grader makes from the ground truth
    turns: str  # turns as JSON; empty: the completion is the only turn
    judged: dict[str, Score]  # scores of judges
    prompt_text: str
    step: int
    max_steps: int

    @property
    def episode(self) -> Episode:
        text = self.completion or ""
        turns = [EpisodeTurn(*record) for record in json.loads(self.turns)] if self.turns else [EpisodeTurn(text)]
        return Episode(text, turns, self.prompt_text, self.step, self.max_steps)


def encode_request(
    prompt: Prompt,
    completion: str | None,
    turns: Sequence[Turn] = (),
    judged: Mapping[str, Score] = NOT_JUDGED,
    prompt_text: str = "",
    max_steps: int = 0,
) -> bytes:
    """Encode the request to grade a completion. Turns are sent as JSON, because `Turn.info` may contain objects of
    classes that the grader process cannot import. Raises TypeError or ValueError if JSON cannot represent the turns."""
    records = [
        [turn.text, turn.observation, turn.reward, turn.valid, turn.info, list(turn.completion.token_ids)]
        for turn in turns
    ]
    text = json.dumps(records, default=to_json_value) if turns else ""
    step = turns[-1].completion.weight_version if turns else 0
    request = Request(prompt, completion, text, dict(judged), prompt_text, step, max_steps)
    return pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)


def encode_reply(score: Score) -> bytes:
    parts = [score.reward, score.components, score.outcome, score.reason, score.skipped_components]
    return json.dumps(parts).encode() + b"\n"


def decode_reply(line: bytes) -> Score:
    reward, components, outcome, reason, skipped = json.loads(line)
    return Score(reward, components, Outcome(outcome), reason, skipped_components=tuple(skipped))
