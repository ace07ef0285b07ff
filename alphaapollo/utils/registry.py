"""Register objects, e.g. losses, under the names that configurations use, and suggest corrections of names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
DecoratedT = TypeVar("DecoratedT")


def find_similar(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return the known names most similar to `name`, best first. cutoff: smallest similarity, from 0 to 1."""
    return difflib.get_close_matches(name, list(known), count, cutoff)


def suggest_similar(name: str, known: Iterable[str], count: int = 1) -> str:
    """Return a sentence that suggests known names instead of `name`; empty if no known name is similar.

    >>> suggest_similar("add_", ["add", "sleep"])
    " Did you mean 'add'?"
    """
    return format_suggestion(find_similar(name[:100], known, count))


def format_suggestion(names: Sequence[str]) -> str:
    """Return ` Did you mean 'a' or 'b'?`; empty if there are no names."""
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


class Registry(Generic[T]):
    """Registry of objects of one kind by name, e.g. policy losses. Duplicate and unknown names raise ValueError.

    >>> losses = Registry("policy loss")
    >>> @losses.register("ppo")
    ... def ppo(): ...
    """

    def __init__(self, kind: str):
        self.kind = kind  # e.g. policy loss, for messages
        self._entries: dict[str, T] = {}

    def register(
        self, name: str, make_entry: Callable[[Any], T] = lambda decorated: decorated
    ) -> Callable[[DecoratedT], DecoratedT]:
        """Return a decorator that registers `make_entry(decorated)`, by default the decorated object itself.

        Raises ValueError if the name is taken.
        """

        def add(decorated: DecoratedT) -> DecoratedT:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice. Choose another name.")
            self._entries[name] = make_entry(decorated)
            return decorated

        return add

    def get(self, name: str, others: Iterable[str] = ()) -> T:
        """Return the object of this name. Raises ValueError with similar names if the name is unknown. others: known
        names that are not registered yet."""
        if name not in self._entries:
            names = sorted({*self._entries, *others})
            hint, known = suggest_similar(name, names, count=3), ", ".join(names)
            raise ValueError(
                f"unknown {self.kind} {name!r}.{hint} Known: {known}. Your own needs the key custom_module."
            )
        return self._entries[name]

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries
