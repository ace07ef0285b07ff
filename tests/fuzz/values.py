"""Typical mistakes of users and programs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TEXTS = ["", " ", "0", "-1", "1e309", "nan", "null", "true", "é", "数学", "🙂", "a\0b", "\ud800", "x" * 300, "../..",
         "/", "/dev/null", "/no/such", "{x}", "[1", "a=b", "a,b", "~", "$HOME", "${x}", "%s", "{{ 1 }}", "\n", "'", '"',
         "\\"]  # fmt: skip
NUMBERS = [0, -1, 1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.5, -1e-9, 1e-300, 1e300, float("inf"),
           float("-inf"), float("nan"), True, False]  # fmt: skip

texts = st.sampled_from(TEXTS) | st.text(max_size=20)
numbers = st.sampled_from(NUMBERS) | st.integers() | st.floats()
scalars: st.SearchStrategy[Any] = st.none() | numbers | texts
anything: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
