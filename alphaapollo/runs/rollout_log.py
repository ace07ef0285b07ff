"""Write rollouts/ of a run: trajectories, what the trainer computed for their tokens, and images.

    step_000012.jsonl       trajectories of training, one JSON line each
    val_000012.jsonl        those of a validation (val_greedy_000012.jsonl: greedy ones)
    trained_000012.npz      what the trainer computed for each token of an iteration
    images/0a1b...png       each distinct image, as the data or the environment gave it, named by its content

One line, e.g. (shortened):

    {"step": 12, "prompt_id": 17, "sample": 0, "prompt": [{"role": ...}], "row_prompt": null,
     "data_source": "openai/gsm8k", "ground_truth": "14", "extra_info": {"index": 17}, "env_kwargs": {},
     "text": "7 + 7 = 14", "reward": 1.0, "components": {"accuracy": 1.0}, "accuracy": 1.0, "outcome": "scored",
     "reason": "", "end": "done", "stop_reason": "stop", "weight_version": 11, "seconds": 0.4,
     "turns": [{"text": "7 + 7 = 14", "observation": null, "stop_reason": "stop", "reward": 0.0, "valid": true, ...}],
     "prompt_digest": "0a1b...",
     "rows": [{"ids": [5, 9, 2], "mask": [0, 1, 1], "logprobs": [0.0, -0.1, -0.2], "first_turn": 0,
               "weight_versions": [[11, 2]]}]}

`prompt` is the first observation. If it differs from the prompt in the data, `row_prompt` is the prompt in the data,
else null. `prompt_digest` is the identity of the prompt (compute_prompt_digest); files of earlier versions have none.
A turn's `text` is what graders get. The trajectory's `text`, and `raw_text` of a truncated turn, have special tokens if
the turn is truncated. `observation` is the environment's reply to the turn, or null. `weight_version` is the number of
weight syncs before the last token was sampled. `weight_versions` of a row, which is one token sequence to train on, has
pairs (weight version, number of tokens sampled with it), in order. Messages have paths of their images, so that the
file is a valid data file in the same folder.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from io import BytesIO
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from alphaapollo.types import EncodedImage, Json, JsonObject, Prompt, Trajectory, TrajectoryGroup
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.json_types import finite_or_none, to_json_value
from alphaapollo.utils.redaction import find_secret_variables, redact_values

QUEUED_FILES = 8  # largest number of pending writes; the loop waits if there are more
IMAGES = "images"
SIGNATURES = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}  # first bytes of a file -> its extension


class TrainedRow(NamedTuple):
    """What the trainer computed for the response of one token sequence. A response starts at the first sampled token.

    Arrays: float32 [response tokens]. Values of tokens that the model did not sample mean nothing.
    """

    prompt_id: int
    sample: int
    row: int  # index in Trajectory.rows
    logprobs: np.ndarray | None  # before the update; None: not computed
    advantages: np.ndarray

    def get_values(self, at: int) -> tuple[float | None, float]:
        """Return log-prob and advantage of a response token."""
        return None if self.logprobs is None else float(self.logprobs[at]), float(self.advantages[at])


class RolloutLog:
    """Writer of rollouts/ in a background thread. If a write fails, the next call raises its OSError."""

    def __init__(self, folder: Path):
        with explain_write_errors("the rollouts", folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-log")
        self._writing: deque[Future[None]] = deque()

    def write(self, step: int, groups: Sequence[TrajectoryGroup], kind: str = "step") -> None:
        """Queue trajectories for writing. They must not change afterwards. kind: start of the file name, e.g. "val"."""
        lines = format_trajectory_lines(step, groups, partial(save_image, self._folder))
        self._queue(f"{kind}_{step:06d}.jsonl", map(str.encode, lines))

    def write_trained_rows(self, step: int, rows: Sequence[TrainedRow]) -> None:
        """Queue what the trainer computed for the tokens of an iteration."""
        self._queue(f"trained_{step:06d}.npz", map(pack_trained_rows, [rows]))

    def close(self) -> None:
        """Wait until all queued files are written."""
        self._wait_for_writes(max_pending=0)
        self._thread.shutdown()

    def _queue(self, name: str, content: Iterable[bytes]) -> None:
        """Write a file in the thread, in which the lazy `content` is computed."""

        def write() -> None:
            with explain_write_errors("the rollouts", self._folder / name):
                replace_file(self._folder / name, content)

        self._wait_for_writes(max_pending=QUEUED_FILES)
        self._writing.append(self._thread.submit(write))

    def _wait_for_writes(self, max_pending: int) -> None:
        """Wait until at most `max_pending` files are not yet written. Raises the OSError of a failed write."""
        while self._writing and (len(self._writing) > max_pending or self._writing[0].done()):
            self._writing.popleft().result()


def pack_trained_rows(rows: Sequence[TrainedRow]) -> bytes:
    """Return the content of trained_000012.npz: prompt_id, sample, row and num_tokens of each row, and logprobs (NaN:
    not computed) and advantages of each response token of all rows, in order."""
    empty = np.zeros(0, np.float32)
    logprobs = [np.full_like(row.advantages, np.nan) if row.logprobs is None else row.logprobs for row in rows]
    content = BytesIO()
    np.savez(
        content,
        prompt_id=np.array([row.prompt_id for row in rows], np.int64),
        sample=np.array([row.sample for row in rows], np.int32),
        row=np.array([row.row for row in rows], np.int32),
        num_tokens=np.array([len(row.advantages) for row in rows], np.int64),
        logprobs=np.concatenate([empty, *logprobs]),
        advantages=np.concatenate([empty, *(row.advantages for row in rows)]),
    )
    return content.getvalue()


def read_trained_rows(path: Path) -> list[TrainedRow]:
    """Read the rows of an iteration. Raises ValueError if the file is damaged."""
    return _read_trained_rows(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_trained_rows(path: Path, _mtime: int) -> list[TrainedRow]:
    rows = []
    try:
        with np.load(path) as file:
            data = dict(file)
        spans = pairwise(np.concatenate([[0], np.cumsum(data["num_tokens"])]))
        identities = zip(data["prompt_id"].tolist(), data["sample"].tolist(), data["row"].tolist(), strict=True)
        for identity, (start, end) in zip(identities, spans, strict=True):
            logprobs, advantages = data["logprobs"][start:end], data["advantages"][start:end]
            rows.append(TrainedRow(*identity, None if np.isnan(logprobs).all() else logprobs, advantages))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    return rows


def read_image_bytes(encoded_image: EncodedImage) -> bytes:
    """Return the encoded image. Raises OSError if its file cannot be read."""
    return encoded_image if isinstance(encoded_image, bytes) else Path(encoded_image).expanduser().read_bytes()


def find_image_extension(data: bytes) -> str:
    """Return the extension of an encoded image, e.g. "png"; "bin" for an unknown format."""
    return next((name for start, name in SIGNATURES.items() if data.startswith(start)), "bin")


def name_image(encoded_image: EncodedImage) -> str:
    """Return the name of an image in a log, e.g. images/0a1b...png, or the given path if the file cannot be read."""
    try:
        data = read_image_bytes(encoded_image)
    except OSError:
        return str(encoded_image)  # the reason is in the score of its episode
    return f"{IMAGES}/{hashlib.blake2b(data, digest_size=16).hexdigest()}.{find_image_extension(data)}"


def save_image(folder: Path, encoded_image: EncodedImage) -> str:
    """Write an image to the subfolder `images` of a log's folder, unless it exists. Returns its name (name_image)."""
    name = name_image(encoded_image)
    path = folder / name
    if name != encoded_image and not path.exists():  # equal: the file cannot be read
        path.parent.mkdir(exist_ok=True)
        replace_file(path, [read_image_bytes(encoded_image)])
    return name


def replace_images(content: Json, name: Callable[[EncodedImage], str] = name_image) -> Json:
    """Return messages with the names of their images. A text is returned unchanged."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    return [
        message | {"images": [*map(name, message["images"])]} if message.get("images") else message
        for message in content
    ]


def describe_prompt(prompt: Prompt) -> JsonObject:
    """Return the columns of a prompt's data row in a log, and its digest as `prompt_digest`. If the log is read as data
    (data/prompts.py), these columns and the logged text give the same prompt."""

    def convert(value: Json) -> Json:
        shown = to_json_value(value)
        return f"{shown}, {hashlib.blake2b(value).hexdigest()}" if isinstance(value, bytes) else shown

    columns = {
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth_in_files,
        "extra_info": prompt.extra_info,
        "env_kwargs": prompt.env_kwargs,
    }
    columns = json.loads(json.dumps(_replace_nan(columns), default=convert))
    others = {"prompt": replace_images(prompt.content), "template": _replace_nan(prompt.template_arguments)}
    text = json.dumps(columns | others, sort_keys=True, default=convert)
    return columns | {"prompt_digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def compute_prompt_digest(prompt: Prompt) -> str:
    """Return the identity of a prompt: a digest of its text, its images by content, its ground truth, and all other
    columns that the model, the environment and the reward can read, but not of its position in the data."""
    return str(describe_prompt(prompt)["prompt_digest"])


def format_trajectory_lines(
    step: int, groups: Sequence[TrajectoryGroup], show_image: Callable[[EncodedImage], str] = name_image
) -> Iterator[str]:
    """Yield one JSON line per trajectory, with secrets redacted. ReMax's greedy episode follows the samples of its
    group. show_image: returns the text that represents an image."""
    secrets = find_secret_variables()  # tools and servers may return secrets
    for group in groups:
        prompt_columns = describe_prompt(group.prompt)
        for trajectory in (*group.trajectories, *filter(None, [group.baseline])):
            record = make_trajectory_record(step, group.prompt, trajectory, show_image) | prompt_columns
            # msgspec encodes the rows, which are most of a line: it blocks the loop less. It also writes null for NaN.
            rows = msgspec.json.encode(record.pop("rows"), enc_hook=to_json_value).decode()
            redacted = redact_values(_replace_nan(record), secrets)
            line = json.dumps(
                redacted,
                allow_nan=False,
                ensure_ascii=False,
                default=lambda value: redact_values(to_json_value(value), secrets),
            )
            # a lone surrogate, e.g. from an environment, has no UTF-8 encoding but a JSON escape: \ud800
            text = line.encode("utf-8", "backslashreplace").decode()
            yield text[:-1] + f', "rows": {rows}}}\n'


def make_trajectory_record(
    step: int, prompt: Prompt, trajectory: Trajectory, show_image: Callable[[EncodedImage], str] = name_image
) -> JsonObject:
    """Return the record of a trajectory in rollouts/, to which describe_prompt adds the data row."""
    score, last = trajectory.score, trajectory.last_turn.completion if trajectory.last_turn else None
    first_prompt = prompt.content if trajectory.first_observation is None else trajectory.first_observation
    return {
        "step": step,
        "prompt_id": prompt.id,
        "sample": trajectory.sample,
        "prompt": replace_images(first_prompt, show_image),
        "row_prompt": None if first_prompt == prompt.content else replace_images(prompt.content, show_image),
        "data_source": prompt.data_source,
        "text": "\n\n".join(turn.raw_text or turn.text for turn in trajectory.turns),
        "reward": finite_or_none(score.reward),
        "components": score.components,
        "accuracy": trajectory.accuracy,
        "outcome": score.outcome,
        "reason": score.reason,
        "end": trajectory.end,
        "stop_reason": last.stop_reason if last else None,
        "weight_version": last.weight_version if last else None,
        "seconds": round(trajectory.seconds, 4),
        "turns": [
            {
                "text": turn.text,
                **({"raw_text": turn.raw_text} if turn.raw_text else {}),
                "observation": replace_images(turn.observation, show_image),
                "num_shown_tokens": num_shown_tokens,
                "num_tokens": len(turn.completion.token_ids),
                "num_cached_tokens": turn.completion.num_cached_tokens,
                "stop_reason": turn.completion.stop_reason,
                "weight_version": turn.completion.weight_version,
                "reward": turn.reward,
                "valid": turn.valid,
                "info": turn.info,
            }
            for turn, num_shown_tokens in zip_longest(trajectory.turns, trajectory.prompt_lengths)
        ],
        "rows": [
            {
                "ids": row.token_ids,
                "mask": row.action_mask,
                "logprobs": row.logprobs,
                "first_turn": row.first_turn,
                "weight_versions": row.weight_versions,
            }
            for row in trajectory.rows
        ],
    }


def _replace_nan(value: Json) -> Json:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {str(key): _replace_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(item) for item in value]
    return finite_or_none(value) if isinstance(value, float) else value
