"""What a machine has."""

from __future__ import annotations

import pytest

from alphaapollo.controller.worker_counts import bfloat16_units


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ("fpu avx512f avx512_bf16 amx_bf16 amx_tile", "amx_bf16"),
        ("fpu avx512f avx512_bf16", "avx512_bf16"),
        ("fpu avx512f bf16", ""),
    ],
)
def test_the_processors_own_bfloat16(flags: str, units: str) -> None:
    assert bfloat16_units(f"model name\t: avx512_bf16 in a name\nflags\t\t: {flags}\n") == units


def test_another_systems_cpuinfo() -> None:
    assert bfloat16_units("") == ""
