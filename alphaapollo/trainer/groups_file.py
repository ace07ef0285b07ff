"""Files of trajectory groups, in recorded iterations and in checkpoints with data.reuse.

groups.msgpack    trajectory groups, without the pixels of pictures
images.msgpack    pixels of each distinct picture by its digest; only if there are pictures
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alphaapollo.observability.json_values import to_json_value
from alphaapollo.types import ImageInput, JsonObject, Trajectory, TrajectoryGroup

GROUPS, IMAGES = "groups.msgpack", "images.msgpack"
ARRAY = 1  # extension code of numpy arrays in msgpack


def write_groups(folder: Path, groups: Sequence[TrajectoryGroup]) -> None:
    """Write rollout groups (groups.msgpack) and their pictures (images.msgpack) to the folder."""
    images: dict[str, dict[str, np.ndarray]] = {}

    def remove_tensors(image: ImageInput) -> ImageInput:
        images[image.digest] = image.tensors
        return replace(image, tensors={})

    groups = _replace_images(groups, remove_tensors)
    if images:
        (folder / IMAGES).write_bytes(msgspec.msgpack.encode(images, enc_hook=_encode_for_msgpack))
    try:
        encoded = msgspec.msgpack.encode(groups, enc_hook=_encode_for_msgpack)
    except UnicodeEncodeError:  # a lone surrogate, e.g. from an environment, has no UTF-8 encoding
        encoded = msgspec.msgpack.encode(_escape_surrogates(groups), enc_hook=_encode_for_msgpack)
    (folder / GROUPS).write_bytes(encoded)


def read_groups(folder: Path) -> list[TrajectoryGroup]:
    """Read the rollout groups that `write_groups` wrote."""
    groups: list[TrajectoryGroup] = _decode_msgpack_file(folder / GROUPS, list[TrajectoryGroup])
    if not (folder / IMAGES).is_file():
        return groups
    tensors, images = _decode_msgpack_file(folder / IMAGES, dict[str, JsonObject]), dict[str, ImageInput]()
    return _replace_images(
        groups, lambda image: images.setdefault(image.digest, replace(image, tensors=tensors[image.digest]))
    )


def _replace_images(
    groups: Sequence[TrajectoryGroup], change: Callable[[ImageInput], ImageInput]
) -> list[TrajectoryGroup]:
    """Return a copy of the groups with other pictures."""

    def replace_in(trajectory: Trajectory) -> Trajectory:
        turns = [replace(turn, context_images=tuple(map(change, turn.context_images))) for turn in trajectory.turns]
        rows = [replace(row, images=tuple(map(change, row.images))) for row in trajectory.rows]
        return replace(trajectory, turns=turns, rows=rows)

    return [
        replace(
            group,
            trajectories=list(map(replace_in, group.trajectories)),
            baseline=group.baseline and replace_in(group.baseline),
        )
        for group in groups
    ]


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
