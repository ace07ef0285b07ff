"""Messages on the pipes of a grader process.

Requests are pickled (prompt, completion, turns as JSON). Replies are lines of JSON, because a process that grades
untrusted text must not send pickles. The first line is {problem, takes_turns}; then one line answers each request. If a
grader's libraries are imported for a request, IMPORTING and, when that is done, an empty line come before the reply.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.observability.json_values import plain
from alphaapollo.types import Episode, EpisodeTurn, Outcome, Prompt, Score, Turn

IMPORTING = b"importing\n"


def worker_environment() -> dict[str, str]:
    """Environment of this process, extended so that a child process finds this package."""
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def encode_request(prompt: Prompt, completion: str, turns: Sequence[Turn] = ()) -> bytes:
    """Encode a request. Turns are sent as JSON, because the worker may lack the classes that an environment puts in.

    Raises:
        TypeError, ValueError: JSON cannot represent the turns.
    """
    records = [[turn.text, turn.observation, turn.reward, turn.valid, turn.info] for turn in turns]
    text = json.dumps(records, default=plain) if turns else ""
    return pickle.dumps((prompt, completion, text), protocol=pickle.HIGHEST_PROTOCOL)


def decode_request(request: tuple[Prompt, str, str]) -> tuple[Prompt, Episode]:
    """Decode an unpickled request. Without turns, the completion is the only one."""
    prompt, completion, text = request
    turns = [EpisodeTurn(*record) for record in json.loads(text)] if text else [EpisodeTurn(completion)]
    return prompt, Episode(completion, turns)


def encode_reply(score: Score) -> bytes:
    return json.dumps([score.reward, score.components, score.outcome, score.reason]).encode() + b"\n"


def decode_reply(line: bytes) -> Score:
    reward, components, outcome, reason = json.loads(line)
    return Score(reward, components, Outcome(outcome), reason)
