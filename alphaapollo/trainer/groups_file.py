"""Files of trajectory groups, in recorded iterations and in checkpoints with data.reuse.

groups.msgpack    trajectory groups, without the pixels of images
images.msgpack    pixels of each distinct image by its digest; only if there are images
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alphaapollo.types import ImageInput, JsonObject, Row, Trajectory, TrajectoryGroup
from alphaapollo.utils.json_types import to_json_value

GROUPS, IMAGES = "groups.msgpack", "images.msgpack"
ARRAY = 1  # extension code of numpy arrays in msgpack
ROW_FIELDS = {field.name for field in fields(Row)} - {"columns"}


def write_groups(folder: Path, groups: Sequence[TrajectoryGroup]) -> None:
    """Write rollout groups (groups.msgpack) and their images (images.msgpack) to the folder."""
    images: dict[str, dict[str, np.ndarray]] = {}

    def remove_tensors(image: ImageInput) -> ImageInput:
        images[image.digest] = image.tensors
        return replace(image, tensors={})

    groups = _change_trajectories(groups, partial(_replace_images, remove_tensors))
    if images:
        (folder / IMAGES).write_bytes(msgspec.msgpack.encode(images, enc_hook=_encode_for_msgpack))
    groups = _change_trajectories(groups, _flatten_columns)
    try:
        encoded = msgspec.msgpack.encode(groups, enc_hook=_encode_for_msgpack)
    except UnicodeEncodeError:  # a lone surrogate, e.g. from an environment, has no UTF-8 encoding
        encoded = msgspec.msgpack.encode(_escape_surrogates(groups), enc_hook=_encode_for_msgpack)
    (folder / GROUPS).write_bytes(encoded)


def read_groups(folder: Path) -> list[TrajectoryGroup]:
    """Read the rollout groups that `write_groups` wrote."""
    values = _restore_columns(_decode_msgpack_file(folder / GROUPS, list[JsonObject]))
    groups = msgspec.convert(values, list[TrajectoryGroup])
    if not (folder / IMAGES).is_file():
        return groups
    tensors, images = _decode_msgpack_file(folder / IMAGES, dict[str, JsonObject]), dict[str, ImageInput]()

    def add_tensors(image: ImageInput) -> ImageInput:
        return images.setdefault(image.digest, replace(image, tensors=tensors[image.digest]))

    return _change_trajectories(groups, partial(_replace_images, add_tensors))


def _replace_images(change: Callable[[ImageInput], ImageInput], trajectory: Trajectory) -> Trajectory:
    """Return a copy of a trajectory with other images."""
    turns = [replace(turn, context_images=tuple(map(change, turn.context_images))) for turn in trajectory.turns]
    rows = [replace(row, images=tuple(map(change, row.images))) for row in trajectory.rows]
    return replace(trajectory, turns=turns, rows=rows)


def _change_trajectories(
    groups: Sequence[TrajectoryGroup], change: Callable[[Trajectory], Trajectory]
) -> list[TrajectoryGroup]:
    return [
        replace(
            group,
            trajectories=list(map(change, group.trajectories)),
            baseline=group.baseline and change(group.baseline),
        )
        for group in groups
    ]


def _flatten_columns(trajectory: Trajectory) -> Trajectory:
    """Replace rows by their form in files: fields, with the columns beside them."""
    rows: Any = [{name: getattr(row, name) for name in ROW_FIELDS} | row.columns for row in trajectory.rows]
    return replace(trajectory, rows=rows)


def _restore_columns(groups: list[JsonObject]) -> list[JsonObject]:
    """Move the columns of rows from their form in files to Row.columns, in place. Returns the groups."""
    trajectories = (one for group in groups for one in [*group["trajectories"], group["baseline"]] if one)
    for row in (row for trajectory in trajectories for row in trajectory["rows"]):
        found = {name: row.pop(name) for name in row.keys() - ROW_FIELDS}
        row["columns"] = {name: value for name, value in found.items() if value is not None and len(value)}
    return groups


def _decode_msgpack_file(path: Path, kind: Any) -> Any:
    return msgspec.msgpack.decode(path.read_bytes(), type=kind, ext_hook=lambda _, data: _decode_msgpack_array(data))


def _encode_for_msgpack(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, np.ndarray) and value.dtype != object:
        parts = (value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(parts))
    return to_json_value(value)


def _decode_msgpack_array(data: memoryview) -> np.ndarray:
    dtype, shape, values = msgspec.msgpack.decode(data)
    return np.frombuffer(values, np.dtype(dtype)).reshape(shape)


def _escape_surrogates(value: Any) -> Any:
    """Return a copy of a nested value in which strings have no lone surrogates, which UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_surrogates(inner) for inner in value]
    if is_dataclass(value):
        return {field.name: _escape_surrogates(getattr(value, field.name)) for field in fields(value)}
    return value
