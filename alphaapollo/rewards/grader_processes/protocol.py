"""The command of a grader process, and the frames on its pipes.

A frame is a 4-byte big-endian length and that many bytes. Requests are pickled (prompt, completion, turns as JSON).
Replies are JSON, one for each request, in order, because a process that grades untrusted text must not send pickles.
The first frame is READY, READY_FOR_TURNS or an error message; later, IMPORTING and READY appear between replies.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.observability.json_values import plain
from alphaapollo.types import Episode, EpisodeTurn, Outcome, Prompt, Score, Turn

READY = b"ready"  # started, or finished importing: the time limit of the active request begins
READY_FOR_TURNS = b"ready for turns"  # started, and a function takes a trajectory
IMPORTING = b"importing"  # a built-in grader's libraries, on its first use: not grading time
HEADER = struct.Struct(">I")


def worker_command(reward: Reward, custom: CustomRewardFunction) -> list[str]:
    """Command of a grader process that dies with this process."""
    settings = json.dumps([reward.model_dump(), custom.model_dump()])
    return [sys.executable, "-P", "-m", "alphaapollo.rewards.grader_processes.worker", str(os.getpid()), settings]


def worker_environment() -> dict[str, str]:
    """Environment of this process, extended so that a child process finds this package."""
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def to_frame(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def read_frame(pipe: BinaryIO) -> bytes | None:
    """Read the next frame; None at the end."""
    header = pipe.read(HEADER.size)
    return pipe.read(*HEADER.unpack(header)) if header else None


def encode_request(prompt: Prompt, completion: str, turns: Sequence[Turn] = ()) -> bytes:
    """Encode a request. Turns are sent as JSON, because the worker may lack the classes that an environment puts in.

    Raises:
        TypeError, ValueError: JSON cannot represent the turns.
    """
    records = [[turn.text, turn.observation, turn.reward, turn.valid, turn.info] for turn in turns]
    text = json.dumps(records, default=plain) if turns else ""
    return pickle.dumps((prompt, completion, text), protocol=pickle.HIGHEST_PROTOCOL)


def decode_request(data: bytes) -> tuple[Prompt, Episode]:
    """Decode a request. Without turns, the completion is the only one."""
    prompt, completion, text = pickle.loads(data)
    turns = [EpisodeTurn(*record) for record in json.loads(text)] if text else [EpisodeTurn(completion)]
    return prompt, Episode(completion, turns)


def encode_reply(score: Score) -> bytes:
    return json.dumps([score.reward, score.components, score.outcome, score.reason]).encode()


def decode_reply(data: bytes) -> Score:
    reward, components, outcome, reason = json.loads(data)
    return Score(reward, components, Outcome(outcome), reason)
