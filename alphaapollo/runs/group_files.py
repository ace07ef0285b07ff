"""Files of rollout groups and other values of a run, in msgpack. A reader runs no code and trusts no number of a file.

    dataclasses     maps of their fields; the reader builds them from the annotated types
    arrays          extension types; an array that several objects share, e.g. of an image, is stored once
    other objects   as in JSON files, e.g. in the info of an environment

Files that earlier versions pickled are converted in a process of their own (old_group_files.py).
"""

from __future__ import annotations

import re
import signal
import subprocess
from array import array
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from alphaapollo.processes.python_command import make_module_command, make_subprocess_environ
from alphaapollo.utils.disk import explain_damage, open_regular
from alphaapollo.utils.json_types import to_json_value
from alphaapollo.utils.redaction import replace_surrogates

T = TypeVar("T")
ARRAY, SAME_ARRAY, COMPACT_LIST = 1, 2, 3  # extension types: numpy array, number of an earlier array, array.array
NUMERIC = re.compile(r"[<>|][biufc]\d+")  # dtypes


def write_values(path: Path, value: object) -> None:
    """Write dataclasses, containers, arrays and plain values."""
    path.write_bytes(encode_values(value))


def encode_values(value: object) -> bytes:
    """Return the content of a file."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=partial(_encode, {}))
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, or an integer of more than 64 bits
        plain = msgspec.to_builtins(value, builtin_types=(bytes, array, np.ndarray), enc_hook=partial(_encode, {}))
        return msgspec.msgpack.encode(_make_encodable(plain), enc_hook=partial(_encode, {}))


def read_values(path: Path, kind: type[T]) -> T:
    """Read a file of `write_values`, or the file of the same name that an earlier version pickled. Raises ValueError
    that names the file if it is missing or damaged."""
    old = path.with_suffix(".pickle")
    path = old if old.exists() and not path.exists() else path
    with explain_damage(path), open_regular(path) as file:
        content = _convert_pickle(file.name) if path == old else file.read()
        built: T = _build(kind, msgspec.msgpack.decode(content, ext_hook=partial(_decode, {})))
    return built


def _encode(arrays: dict[int, tuple[int, np.ndarray]], value: Any) -> object:
    if isinstance(value, array):
        return Ext(COMPACT_LIST, value.typecode.encode() + value.tobytes())
    if isinstance(value, np.ndarray) and NUMERIC.fullmatch(value.dtype.str):
        if known := arrays.get(id(value)):
            number, _ = known
            return Ext(SAME_ARRAY, str(number).encode())
        arrays[id(value)] = len(arrays), value  # keeps the array, so that no other one gets its id
        return Ext(ARRAY, msgspec.msgpack.encode((len(arrays) - 1, value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return to_json_value(value)


def _decode(arrays: dict[int, np.ndarray], code: int, content: memoryview) -> object:
    if code == COMPACT_LIST:
        values = array(chr(content[0]))
        values.frombytes(content[1:])
        return values
    if code == SAME_ARRAY:
        return arrays[int(bytes(content))]
    number, dtype, shape, data = msgspec.msgpack.decode(content, type=tuple[int, str, tuple[int, ...], bytearray])
    if code != ARRAY or not NUMERIC.fullmatch(dtype):
        raise ValueError(f"it contains {dtype[:20]!r}, which is no numeric dtype")
    arrays[number] = np.frombuffer(data, dtype).reshape(shape)
    return arrays[number]


def _make_encodable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_make_encodable(key): _make_encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_encodable(item) for item in value]
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    return replace_surrogates(value) if isinstance(value, str) else value


def _build(kind: Any, value: Any) -> Any:
    """Build the dataclasses, enums and tuples of an annotated type from decoded values."""
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        types = _read_field_types(kind)
        return kind(**{name: _build(types[name], field) for name, field in value.items() if name in types})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if origin in (Union, UnionType):  # a dict is the union's dataclass, a list its list or tuple
        is_match = is_dataclass if isinstance(value, dict) else lambda part: get_origin(part) in (list, tuple)
        chosen = next(filter(is_match, parts), None) if isinstance(value, dict | list) else None
        return value if chosen is None else _build(chosen, value)
    if origin is tuple and parts[-1] is not ...:  # a fixed number of items
        return tuple(_build(part, item) for part, item in zip(parts, value, strict=True))
    if origin in (list, tuple, Sequence) and parts[0] not in (int, float, str, Any):
        value = [_build(parts[0], item) for item in value]
    elif origin is dict:
        return {key: _build(parts[1], item) for key, item in value.items()}
    return tuple(value) if origin is tuple else value


@cache
def _read_field_types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _convert_pickle(path: str) -> bytes:
    """Convert a pickle in a process of its own, because a damaged pickle may crash the process."""
    command = make_module_command("alphaapollo.runs.old_group_files", path)
    process = subprocess.run(command, env=make_subprocess_environ(), capture_output=True, stdin=subprocess.DEVNULL)
    if process.returncode < 0:
        raise ValueError(f"its reader died of {signal.Signals(-process.returncode).name}")
    if process.returncode:
        raise ValueError(process.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return process.stdout
