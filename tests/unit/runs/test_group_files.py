"""Files of rollout groups: what is written is read, and what others wrote is a group or one error."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from alphaapollo.runs.group_files import ARRAY, read_values, write_values
from alphaapollo.types import ImageInput, Prompt, TrajectoryGroup
from tests.unit.trainer.replay.test_recording import full_group


def make_group() -> TrajectoryGroup:
    group = full_group()
    group.trajectories[0].turns[0].info = {"seen": np.arange(4).reshape(2, 2).T, "odd": np.array([None, "a"])}
    image = ImageInput({"pixels": np.ones((2, 3), np.float32)}, [5, 5], 5, "digest", (1, 2))
    group.trajectories[0].rows[0].images = (image,)
    group.prompt = replace(group.prompt, ground_truth=np.float32(0.1), extra_info={"at": {1}, "text": "one"})
    return group


def describe(value: Any) -> Any:
    """Return nested values that can be compared, in which arrays and sets are lists."""
    if isinstance(value, np.ndarray):
        return str(value.dtype)[:1] + str(value.shape), describe(value.tolist())
    if isinstance(value, str | bytes | int | float | None):
        return value
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: describe(getattr(value, name)) for name in value.__dataclass_fields__}
    return [describe(item) for item in value]


@pytest.mark.parametrize("protocol", [4, 5])
def test_groups_that_an_earlier_version_pickled_are_read(tmp_path: Path, protocol: int) -> None:
    write_values(tmp_path / "new.msgpack", [make_group()])
    (tmp_path / "old.pickle").write_bytes(pickle.dumps([make_group()], protocol))
    new, old = (read_values(tmp_path / f"{name}.msgpack", list[TrajectoryGroup])[0] for name in ("new", "old"))
    assert describe(old) == describe(new)
    row, given = new.trajectories[0].rows[0], make_group().trajectories[0].rows[0]
    assert describe(replace(row, images=())) == describe(replace(given, images=()))
    assert row.images[0].tensors["pixels"].dtype == np.float32 and row.images[0].grid == (1, 2)
    assert new.prompt.ground_truth == float(np.float32(0.1)) and new.prompt.extra_info == {"at": [1], "text": "one"}
    assert new.trajectories[0].turns[0].info == {"seen": pytest.approx(np.array([[0, 2], [1, 3]])), "odd": [None, "a"]}


def test_values_of_users_that_msgpack_lacks_are_written(tmp_path: Path) -> None:
    given = {"whole": 2**70, "part": "\ud800", "at": np.datetime64("2026-11-30"), "of": object, "yes": np.True_}
    write_values(tmp_path / "file", Prompt(1, "x", "text", extra_info=given))
    read = read_values(tmp_path / "file", Prompt).extra_info
    assert read == given | {"whole": str(2**70), "part": "?", "at": "2026-11-30", "of": str(object)}


class Call:
    """Pickled as a call."""

    def __init__(self, *reduced: Any):
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def pointer() -> object:
    """An array of a type with a hidden field of objects, whose content is an address."""
    fields = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 8, 1)
    kind = Call(np.dtype, ("V8", False, True), fields)
    create: Callable[..., object] = np.empty(0).__reduce__()[0]
    return Call(create, (np.ndarray, (0,), b"b"), (1, (1,), kind, False, struct.pack("<Q", 0x4141414141414141)))


PICKLES = {
    "of a class": pickle.dumps(Path()),
    "of a simple object": pickle.dumps(SimpleNamespace()),
    "of an array of pointers": pickle.dumps(pointer(), 4),
    "of objects as numbers": pickle.dumps(Call(np.frombuffer, (b"AAAAAAAA", np.dtype("O"))), 4),
    "of 1 TiB": pickle.dumps(Call(bytearray, (1 << 40,))),
    "nested": b"\x80\x04)" + b"\x85" * 3_000_000 + b".",
}


@pytest.mark.parametrize("name", PICKLES)
def test_other_pickles_are_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.pickle").write_bytes(PICKLES[name])
    with pytest.raises(ValueError, match=r"file\.pickle cannot be read"):
        read_values(tmp_path / "file.msgpack", list[TrajectoryGroup])


def array_of(dtype: str, shape: tuple[int, ...] = (1,), content: bytes = b"AAAAAAAA") -> bytes:
    return msgspec.msgpack.encode([Ext(ARRAY, msgspec.msgpack.encode((0, dtype, shape, content)))])


FILES = {
    "dtype": array_of("|O"),
    "other fields": msgspec.msgpack.encode([{"prompt": 1}]),
    "a number": b"\x01",
    "depth": b"\x91" * 100_000,
    "empty": b"",
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(FILES[name])
    with pytest.raises(ValueError, match="file cannot be read"):
        read_values(tmp_path / "file", list[TrajectoryGroup])
