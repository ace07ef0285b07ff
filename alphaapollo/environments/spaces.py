"""Actions of Gymnasium's spaces as texts: JSON, whose lists become arrays, tuples or sequences as the space requires.

Discrete                                2
Box, MultiDiscrete, MultiBinary         [0.5, 1]
Text                                    open the door, without quotes
Dict                                    {"move": 1, "force": [0.5]}
Tuple, Sequence                         [1, [0.5]]
OneOf                                   [0, 1]: the number of the space, and its action"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from alphaapollo.utils.json_types import Json

Space = Any  # of Gymnasium, which need not be installed
ARRAYS = {"Box", "MultiDiscrete", "MultiBinary"}
LISTS = {"Tuple", "Sequence", "OneOf"}


def get_kind(space: Space) -> str:
    """Return the name of the Gymnasium class of a space, or an empty text for other classes."""
    names = [base.__name__ for base in type(space).__mro__]
    return next((name for name in names if name in {*ARRAYS, *CONVERTERS}), "")


def read_space_action(space: Space, text: str) -> object:
    """Return the action of a space that a text stands for. Raises ValueError if the text stands for no action."""
    try:
        action = _convert(space, text if get_kind(space) == "Text" else json.loads(text))
        is_action = space.contains(action)
    except (ValueError, TypeError, OverflowError, RecursionError):
        is_action = False
    if not is_action:
        raise ValueError(f"{text[:50]!r} is not an action of {space}")
    return action


def write_space_action(space: Space, action: object) -> str:
    """Return the text of an action. Raises ValueError if a text cannot stand for the actions of the space."""
    text = action if isinstance(action, str) else json.dumps(action, default=lambda array: array.tolist())
    try:
        read_space_action(space, text)
    except ValueError as error:
        raise ValueError(
            f"the model cannot write actions of the space {space}. Use Gymnasium's Discrete, MultiDiscrete, "
            "MultiBinary, Box, Text, Tuple, Dict, OneOf, or Sequence without stack; a wrapper may convert the actions."
        ) from error
    return text


def show_observation(observation: object) -> str:
    """Return the complete text of an observation: numpy abbreviates arrays of more than 1,000 elements."""
    with np.printoptions(threshold=sys.maxsize):
        return str(observation)


def _convert(space: Space, value: Json) -> object:
    """Convert a JSON value to a value of the space. Raises ValueError or TypeError if the shapes differ."""
    kind = get_kind(space)
    if isinstance(value, bool) or (kind in LISTS and not isinstance(value, list)) or getattr(space, "stack", False):
        raise TypeError(f"the space has no action {value!r:.80}")
    if kind not in ARRAYS:
        return CONVERTERS[kind](space, value) if kind else value
    given = np.asarray(value)
    array = given.astype(space.dtype)
    if given.dtype.kind not in "iuf" or (array.dtype.kind != "f" and (array != given).any()):
        raise ValueError("the numbers do not fit the array")
    return array


def _convert_tuple(space: Space, value: Json) -> tuple[object, ...]:
    return tuple(_convert(part, element) for part, element in zip(space.spaces, value, strict=True))


def _convert_dict(space: Space, value: Json) -> dict[str, object]:
    if not isinstance(value, dict) or value.keys() != space.spaces.keys():
        raise ValueError(f"the keys must be {', '.join(space.spaces)}")
    return {name: _convert(part, value[name]) for name, part in space.spaces.items()}


def _convert_one_of(space: Space, value: Json) -> tuple[object, ...]:
    number, action = value
    return number, _convert(dict(enumerate(space.spaces)).get(number), action)  # contains() checks the number


CONVERTERS: dict[str, Callable[[Space, Json], object]] = {
    "Discrete": lambda _, value: value,
    "Text": lambda _, value: value,
    "Tuple": _convert_tuple,
    "Dict": _convert_dict,
    "Sequence": lambda space, value: tuple(_convert(space.feature_space, element) for element in value),
    "OneOf": _convert_one_of,
}
