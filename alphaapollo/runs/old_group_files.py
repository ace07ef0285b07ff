"""Convert a file that formats before 3 pickled: `python -m alphaapollo.runs.old_group_files FILE` writes its values to
stdout, in the format of group_files.py.

No code of the file runs, and no function of numpy gets a state from it: placeholders accept numeric dtypes and bytes.
"""

from __future__ import annotations

import os
import pickle
import re
import resource
import sys
from typing import Any

import numpy as np

import alphaapollo.types as types
from alphaapollo.runs.group_files import encode_values

ALLOWED = {
    "array": ("array", "_array_reconstructor"),
    "builtins": ("bytearray", "complex", "frozenset", "set"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "json": ("loads",),
}
DTYPE = re.compile(r"[biufcUSO]\d+")
BASE_MEMORY, MEMORY_PER_BYTE = 2 << 30, 30  # limit of the process's memory in bytes, and per byte of the file


class DType:
    """Placeholder for numpy.dtype."""

    def __init__(self, name: str, *_: object):
        if not DTYPE.fullmatch(name):
            raise pickle.UnpicklingError(f"the file uses the dtype {name[:20]!r}, which is not allowed")
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.order, *parts = state[:5]
        if self.order not in ("<", ">", "|", "=") or parts != [None, None, None]:
            raise pickle.UnpicklingError("the file uses a dtype with fields, which is not allowed")

    def read(self, content: bytes) -> np.ndarray:
        return np.frombuffer(content, np.dtype(self.order + self.name))


class Array:
    """Placeholder for a numpy array whose state follows. The value is a list if its elements are objects."""

    value: object = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        is_list = isinstance(content, list)
        self.value = content if is_list else restore_array(content, dtype, shape, "F" if is_fortran else "C")

    def tolist(self) -> object:
        """Return the array, for the encoder."""
        return self.value


def restore_array(content: bytes, dtype: DType, shape: tuple[int, ...], order: Any, axes: Any = None) -> np.ndarray:
    """Do what numpy._core.numeric._frombuffer does."""
    values = dtype.read(content)
    return values.reshape(shape).transpose(axes) if axes is not None else values.reshape(shape, order=order)


ARRAY_FUNCTIONS = {
    ("numpy", "dtype"): DType,
    ("numpy", "ndarray"): Array,
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: Array(),
    ("numpy._core.multiarray", "scalar"): lambda dtype, content: dtype.read(content)[0],
    ("numpy._core.numeric", "_frombuffer"): restore_array,
}


class Unpickler(pickle.Unpickler):
    """Unpickler of the project's dataclasses, plain values and numeric arrays."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in ARRAY_FUNCTIONS:
            return ARRAY_FUNCTIONS[module, name]
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        found = vars(types).get(name) if module == types.__name__ else None
        if not (isinstance(found, type) and found.__module__ == types.__name__):
            raise pickle.UnpicklingError(f"the file uses {module}.{name}, which is not allowed")
        return found


def main(path: str) -> None:
    """Convert a file."""
    memory = BASE_MEMORY + MEMORY_PER_BYTE * os.path.getsize(path)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with open(path, "rb") as file:
        sys.stdout.buffer.write(encode_values(Unpickler(file).load()))


if __name__ == "__main__":
    main(*sys.argv[1:])
