"""Credit per turn with the names and parameters of the vectors files."""

from __future__ import annotations

from tests.golden.common import Function

FUNCTIONS: dict[str, Function] = {}
