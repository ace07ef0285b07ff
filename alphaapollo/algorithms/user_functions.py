"""Registries of advantage estimators and losses, and the errors of functions that users or packages register."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor

from alphaapollo.utils.plugins import find_plugins
from alphaapollo.utils.registry import Registry
from alphaapollo.utils.user_module import format_error


class Entry(Protocol):
    """Registered function with its declarations."""

    @property
    def fn(self) -> Callable[..., object]: ...


EntryT = TypeVar("EntryT", bound=Entry)
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


class FunctionRegistry(Registry[EntryT]):
    """Registry of functions (inputs, config) -> result, each in an entry that declares what it needs.

    group: of entry points with which installed packages add functions. An entry point names the function or its module,
    whose decorator registers it when it is looked up."""

    def __init__(self, kind: str, group: str, entry_class: Callable[..., EntryT], config_class: type[BaseModel]):
        super().__init__(kind)
        self._group, self._entry_class, self._config_class = group, entry_class, config_class

    def get(self, name: str, others: Iterable[str] = ()) -> EntryT:
        """As in Registry. Raises ValueError if the package that adds the name cannot be imported, or registers another
        name, or if a package adds a name of the project."""
        added = find_plugins(self._group, [name for name, entry in self._entries.items() if is_own(entry.fn)])
        if name in added and name not in self:
            added[name].load()
            if name not in self:
                raise ValueError(
                    f"{added[name].owner} adds the {self.kind} {name!r}, but {added[name].value} does not register it. "
                    "Give the decorator and the entry point the same name."
                )
        return super().get(name, {*others, *added})

    def declare(self, name: str, *takes: str, **declarations: object) -> Callable[[FunctionT], FunctionT]:
        """Return a decorator that registers a function under a name of the configuration.

        takes: fields of the inputs or the config to pass as arguments; empty: the function gets (inputs, config).
        declarations: optional fields of the entry. With `reads` (or `takes`), a run warns about keys that are not read.
        """
        if takes:
            reads = tuple(key for key in takes if key in self._config_class.model_fields)
            declarations = {"reads": reads} | declarations
        return self.register(name, lambda fn: self._entry_class(name, _unpack(fn, takes), **declarations))


def _unpack(function: Callable[..., object], takes: Sequence[str]) -> Callable[..., object]:
    """Return a function of (inputs, config) that passes the named fields of both to `function`."""

    @wraps(function)
    def call(inputs: object, config: object) -> object:
        return function(*(getattr(inputs if hasattr(inputs, name) else config, name) for name in takes))

    return call if takes else function


def is_own(function: Callable[..., object]) -> bool:
    """Return whether a function is the project's, not a user's or a package's."""
    return function.__module__.startswith("alphaapollo.")


@contextmanager
def explain_user_errors(function: Callable[..., object], label: str) -> Iterator[None]:
    """Context manager: convert any error of a user's function to a one-line ValueError that names its file.

    label: e.g. "the policy loss 'mine'".
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the user's code may raise anything
        if is_own(function):
            raise
        file = Path(inspect.getsourcefile(inspect.unwrap(function)) or "?")
        raise ValueError(f"{file}: {label} failed: {format_error(error, file)}. Fix {function.__name__}().") from error


def check_type(value: object, expected: type) -> None:
    """Raise ValueError unless a function returned a value of this type."""
    if not isinstance(value, expected):
        raise ValueError(f"it must return {expected.__name__}, but returned {type(value).__name__}")


def check_finite_gradient(loss: Tensor, logp: Tensor) -> None:
    """Raise ValueError unless a loss of finite inputs and its gradient with respect to the log-probs are finite."""
    (gradient,) = torch.autograd.grad(loss, logp)
    for what, values in {"the loss": loss, "the gradient of the loss": gradient}.items():
        if not values.isfinite().all():
            raise ValueError(f"{what} is not finite for inputs that are")


def check_float_tensor(name: str, value: object, shape: Sequence[int]) -> None:
    """Raise ValueError unless `value`, called `name` in the error, is a float tensor of this shape. Does not
    synchronize with the GPU."""
    if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
        actual = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a float tensor of shape {tuple(shape)}, but got {actual}")
