"""Files of rollout groups: pickles of types.py and plain values. Reading one runs no code of the file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from alphaapollo.utils.json_types import to_json_value

TYPES = "alphaapollo.types"
ALLOWED = {  # besides the classes of types.py
    "array": ("array", "_array_reconstructor"),
    "builtins": ("bytearray", "complex", "frozenset", "set"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "json": ("loads",),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
}


def write_pickle(path: Path, value: object) -> None:
    """Write a value. Objects of unknown classes, e.g. in the info of an environment, are written as in JSON files."""
    with path.open("wb") as file:
        _Pickler(file, protocol=5).dump(value)


def read_pickle(path: Path) -> Any:
    """Read the file of `write_pickle`. Raises UnpicklingError if the file uses another class or function."""
    with path.open("rb") as file:
        return _Unpickler(file).load()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)
        is_known = kind.__module__ == TYPES or kind.__name__ in ALLOWED.get(kind.__module__, ())
        if is_known or isinstance(value, np.dtype | np.generic):
            return NotImplemented
        return json.loads, (json.dumps(to_json_value(value), default=str),)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module == TYPES and name.isidentifier()) or name in ALLOWED.get(module, ()):
            target = super().find_class(module, name)
            if module != TYPES or (isinstance(target, type) and target.__module__ == TYPES):
                return target
        raise pickle.UnpicklingError(f"the file uses {module}.{name}, which is not allowed")
