"""Encode and decode the messages on the pipes of a grader process.

A request is a pickled tuple (prompt, completion, turns as JSON, scores of judges). A reply is a line of JSON, because a
process that grades untrusted text must not send pickles. The first line from a process is {error, takes_turns}. Then it
writes one line per request. If grading first needs to import a module, the process writes IMPORTING before the import,
an empty line after it, and then the reply.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from alphaapollo.observability.json_values import to_json_value
from alphaapollo.types import Episode, EpisodeTurn, Outcome, Prompt, Score, Turn

IMPORTING = b"importing\n"
NOT_JUDGED: Mapping[str, Score] = MappingProxyType({})


def make_subprocess_environ() -> dict[str, str]:
    """Return the environment variables of this process, with the folder of this package added to PYTHONPATH."""
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def encode_request(
    prompt: Prompt, completion: str, turns: Sequence[Turn] = (), judged: Mapping[str, Score] = NOT_JUDGED
) -> bytes:
    """Encode the request to grade a completion. Turns are sent as JSON, because `Turn.info` may contain objects of
    classes that the grader process cannot import. Raises TypeError or ValueError if JSON cannot represent the turns."""
    records = [[turn.text, turn.observation, turn.reward, turn.valid, turn.info] for turn in turns]
    text = json.dumps(records, default=to_json_value) if turns else ""
    return pickle.dumps((prompt, completion, text, dict(judged)), protocol=pickle.HIGHEST_PROTOCOL)


def decode_request(request: tuple[Prompt, str, str, dict[str, Score]]) -> tuple[Prompt, Episode, dict[str, Score]]:
    """Return prompt, episode and scores of judges from an unpickled request. The turns are JSON or "". Without turns,
    the completion is the only turn of the episode."""
    prompt, completion, text, judged = request
    turns = [EpisodeTurn(*record) for record in json.loads(text)] if text else [EpisodeTurn(completion)]
    return prompt, Episode(completion, turns), judged


def encode_reply(score: Score) -> bytes:
    return json.dumps([score.reward, score.components, score.outcome, score.reason]).encode() + b"\n"


def decode_reply(line: bytes) -> Score:
    reward, components, outcome, reason = json.loads(line)
    return Score(reward, components, Outcome(outcome), reason)
