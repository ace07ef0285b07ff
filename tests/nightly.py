"""Values of parameters that only `make test-nightly` tests: they are slow, and other values show nearly the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_night(values: Iterable[Any], nightly: Iterable[Any]) -> list[Any]:
    """All values, with the marker `nightly` on those of `nightly`."""
    later = [*nightly]
    return [pytest.param(value, marks=pytest.mark.nightly) if value in later else value for value in values]
