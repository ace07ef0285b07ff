"""How a grader's process is started, and the frames that go over its pipes.

A frame is a 4-byte big-endian length and that many bytes. Requests are pickled (prompt, completion, turns as JSON);
replies are JSON, one for each request, in order (a process that grades untrusted text is not trusted to unpickle from).
Two notices stand apart from replies, and the first frame is READY, READY_FOR_TURNS or why the process cannot start.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from alphaapollo.observability.json_values import plain
from alphaapollo.types import Episode, EpisodeTurn, Outcome, Prompt, Score, Turn

READY = b"ready"  # started, or done with importing: the clock of the request at work starts now
READY_FOR_TURNS = b"ready for turns"  # the same at the start, where a function takes a trajectory
IMPORTING = b"importing"  # a built-in grader's libraries, on its first use: this is not grading time
HEADER = struct.Struct(">I")


@dataclass(frozen=True)
class Grading:
    """What a grader's process computes, e.g. `Grading("reward.py", "compute_score", {"format": 0.1})`."""

    path: str = ""  # of the user's function; empty = the built-in one of each data source
    name: str = ""
    weights: dict[str, float] = field(default_factory=dict)  # reward.components
    required: Sequence[str] = ()
    judge: dict[str, Any] = field(default_factory=dict)  # the fields of reward.judge
    module: str = ""  # reward.custom_module


def worker_command(grading: Grading) -> list[str]:
    """The command of a grader's process that dies with this one."""
    module = [sys.executable, "-P", "-m", "alphaapollo.rewards.grader_processes.worker"]
    return [*module, str(os.getpid()), json.dumps(asdict(grading))]


def worker_environment() -> dict[str, str]:
    """This process's environment, in which the process finds this package, wherever it is imported from."""
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def to_frame(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def read_frame(pipe: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    header = pipe.read(HEADER.size)
    return pipe.read(*HEADER.unpack(header)) if header else None


def encode_request(prompt: Prompt, completion: str, turns: Sequence[Turn] = ()) -> bytes:
    """The turns go as JSON, for what an environment puts into them is known on this side alone (TypeError, ValueError:
    JSON cannot hold it)."""
    shown = [[turn.text, turn.observation, turn.reward, turn.valid, turn.info] for turn in turns]
    record = json.dumps(shown, default=plain) if turns else ""
    return pickle.dumps((prompt, completion, record), protocol=pickle.HIGHEST_PROTOCOL)


def decode_request(data: bytes) -> tuple[Prompt, Episode]:
    """Where no turns were sent, the completion is the only one."""
    prompt, completion, record = pickle.loads(data)
    turns = [EpisodeTurn(*shown) for shown in json.loads(record)] if record else [EpisodeTurn(completion)]
    return prompt, Episode(completion, turns)


def encode_reply(score: Score) -> bytes:
    return json.dumps([score.reward, score.components, score.outcome, score.reason]).encode()


def decode_reply(data: bytes) -> Score:
    reward, components, outcome, reason = json.loads(data)
    return Score(reward, components, Outcome(outcome), reason)
