"""Detected features of a machine."""

from __future__ import annotations

import pytest

from alphaapollo.controller.placement import find_bfloat16_instruction_set


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ("fpu avx512f avx512_bf16 amx_bf16 amx_tile", "amx_bf16"),
        ("fpu avx512f avx512_bf16", "avx512_bf16"),
        ("fpu avx512f bf16", ""),
    ],
)
def test_the_fastest_bfloat16_instructions_are_found(flags: str, units: str) -> None:
    assert find_bfloat16_instruction_set(f"model name\t: avx512_bf16 in a name\nflags\t\t: {flags}\n") == units


def test_without_cpuinfo_there_are_none() -> None:
    assert find_bfloat16_instruction_set("") == ""
