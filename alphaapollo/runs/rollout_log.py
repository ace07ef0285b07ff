"""Write trajectories to rollouts/: step_000012.jsonl (training), val_000012.jsonl or val_greedy_000012.jsonl
(validation). What the trainer computed for each token is in trained_000012.npz (training_log.py).

    loop -- write(step, groups) --> queue --> thread: one JSON line per trajectory --> .part file --> renamed when
    complete

One line, e.g. (shortened):

    {"step": 12, "prompt_id": 17, "sample": 0, "data_source": "openai/gsm8k", "prompt": [{"role": ...}],
     "ground_truth": "14", "text": "7 + 7 = 14", "reward": 1.0, "components": {"accuracy": 1.0}, "outcome": "scored",
     "reason": "", "end": "done", "stop_reason": "stop", "weight_version": 11, "seconds": 0.4,
     "turns": [{"text": "7 + 7 = 14", "observation": null, "stop_reason": "stop", "reward": 0.0, "valid": true, ...}],
     "rows": [{"ids": [5, 9, 2], "mask": [0, 1, 1], "logprobs": [0.0, -0.1, -0.2], "first_turn": 0,
               "weight_versions": [[11, 2]]}]}

`prompt` is the first observation. If it differs from the prompt in the data, `row_prompt` is the prompt in the data,
else null. A turn's `text` is what graders get. The trajectory's `text`, and `raw_text` of a truncated
turn, have special tokens if the turn is truncated. `observation` is the environment's reply to the turn, or null.
`weight_version` is the number of weight syncs before the last token was sampled. `weight_versions` of a row, which is
one token sequence to train on, has pairs (weight version, number of tokens sampled with it), in order. Images of
messages are files (images.py).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from alphaapollo.runs.images import name_image, replace_images, save_image
from alphaapollo.runs.training_log import TrainedRow, write_trained_rows
from alphaapollo.types import EncodedImage, JsonObject, Prompt, Row, Trajectory, TrajectoryGroup, Turn
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.json_types import finite_or_none, to_json_value
from alphaapollo.utils.redaction import find_secret_variables, redact_values

QUEUED_STEPS = 8  # largest number of pending writes; the loop waits if there are more


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
        self._wait_for_writes(max_pending=QUEUED_STEPS)
        self._writing.append(self._thread.submit(self._write_file, f"{kind}_{step:06d}.jsonl", step, groups))

    def write_trained_rows(self, step: int, rows: Sequence[TrainedRow]) -> None:
        """Queue what the trainer computed for the tokens of an iteration (training_log.py)."""
        self._wait_for_writes(max_pending=QUEUED_STEPS)
        self._writing.append(self._thread.submit(self._write_trained_file, f"trained_{step:06d}.npz", rows))

    def close(self) -> None:
        """Wait until all queued trajectories are written."""
        self._wait_for_writes(max_pending=0)
        self._thread.shutdown()

    def _wait_for_writes(self, max_pending: int) -> None:
        """Wait until at most `max_pending` files are not yet written. Raises the OSError of a failed write."""
        while self._writing and (len(self._writing) > max_pending or self._writing[0].done()):
            self._writing.popleft().result()

    def _write_file(self, name: str, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        with explain_write_errors("the rollouts", self._folder / name):
            lines = format_trajectory_lines(step, groups, partial(save_image, self._folder))
            replace_file(self._folder / name, map(str.encode, lines))

    def _write_trained_file(self, name: str, rows: Sequence[TrainedRow]) -> None:
        with explain_write_errors("the rollouts", self._folder / name):
            write_trained_rows(self._folder / name, rows)


def format_trajectory_lines(
    step: int, groups: Sequence[TrajectoryGroup], show_image: Callable[[EncodedImage], str] = name_image
) -> Iterator[str]:
    """Yield one JSON line per trajectory, with secrets redacted. ReMax's greedy episode follows the samples of its
    group. show_image: returns the text that represents an image."""
    known = find_secret_variables()  # tools and servers may return secrets
    for group in groups:
        for trajectory in (*group.trajectories, *filter(None, [group.baseline])):
            record = make_trajectory_record(step, group.prompt, trajectory, show_image)
            # Rows are most of a line. msgspec writes the same numbers (null for NaN), but blocks the loop less.
            rows = msgspec.json.encode(record.pop("rows"), enc_hook=to_json_value).decode()
            shown = redact_values(_replace_nan(record), known)
            line = json.dumps(
                shown, allow_nan=False, ensure_ascii=False, default=lambda one: redact_values(to_json_value(one), known)
            )
            # a lone surrogate, e.g. from an environment, has no UTF-8 encoding but a JSON escape: \ud800
            text = line.encode("utf-8", "backslashreplace").decode()
            yield text[:-1] + f', "rows": {rows}}}\n'


def make_trajectory_record(
    step: int, prompt: Prompt, trajectory: Trajectory, show_image: Callable[[EncodedImage], str] = name_image
) -> JsonObject:
    """Return the record of a trajectory in rollouts/."""
    score, last = trajectory.score, trajectory.last_turn.completion if trajectory.last_turn else None
    first_prompt = prompt.content if trajectory.first_observation is None else trajectory.first_observation
    return {
        "step": step,
        "prompt_id": prompt.id,
        "sample": trajectory.sample,
        "data_source": prompt.data_source,
        "prompt": replace_images(first_prompt, show_image),
        "row_prompt": None if first_prompt == prompt.content else replace_images(prompt.content, show_image),
        "ground_truth": prompt.ground_truth_in_files,
        "text": "\n\n".join(turn.raw_text or turn.text for turn in trajectory.turns),
        "reward": finite_or_none(score.reward),
        "components": score.components,
        "outcome": score.outcome,
        "reason": score.reason,
        "end": trajectory.end,
        "stop_reason": last.stop_reason if last else None,
        "weight_version": last.weight_version if last else None,
        "seconds": round(trajectory.seconds, 4),
        "turns": [
            _make_turn_record(turn, shown, show_image)
            for turn, shown in zip_longest(trajectory.turns, trajectory.prompt_lengths)
        ],
        "rows": [_make_row_record(row) for row in trajectory.rows],
    }


def _make_turn_record(
    turn: Turn, num_shown_tokens: int | None, show_image: Callable[[EncodedImage], str]
) -> JsonObject:
    return {
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


def _make_row_record(row: Row) -> JsonObject:
    return {
        "ids": row.token_ids,
        "mask": row.action_mask,
        "logprobs": row.logprobs,
        "first_turn": row.first_turn,
        "weight_versions": row.weight_versions,
    }


def _replace_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(item) for item in value]
    return finite_or_none(value) if isinstance(value, float) else value
