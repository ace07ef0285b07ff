"""A key that the schema does not have: the error that it gets, a name of verl's or the nearest of ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from alphaapollo.config.keys import accepted_keys, plain
from alphaapollo.config.verl import verl_verdict
from alphaapollo.utils.registry import nearest


def unknown_key_problem(name: str, schema: type[BaseModel], got: Any) -> str:
    """The error line for a key that the schema does not have."""
    shown = f"{name} (got {plain(got)})"
    verdict = verl_verdict(name, schema)
    if verdict is not None:
        return f"{shown}: a key of verl's, {verdict}."
    near = nearest_keys(name, accepted_keys(schema))
    hint = f"Did you mean {' or '.join(near)}?" if near else "docs/config.md lists every key."
    return f"{shown}: unknown key. {hint}"


def nearest_keys(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known keys most like `name`: those that end alike first (`lr` finds `actor_rollout_ref.actor.optim.lr`)."""
    ends = {key: key.rsplit(".", 1)[-1] for key in known}
    last = name.rsplit(".", 1)[-1]
    same_end = [key for key, end in ends.items() if end == last]
    if same_end:
        return list(dict.fromkeys(nearest(name, same_end, count) + same_end))[:count]
    like_end = [key for close in nearest(last, set(ends.values()), count) for key, end in ends.items() if end == close]
    return list(dict.fromkeys(nearest(name, ends, count) + like_end))[:count]
