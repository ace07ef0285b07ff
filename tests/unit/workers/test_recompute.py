"""Gradients with recomputed layers and offloaded inputs equal those without, bit for bit, for every kind of worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.nightly import at_night
from tests.unit.workers.layouts import compute, run_on_ranks
from tests.unit.workers.roles import ROLES
from tests.unit.workers.training import Case
from tests.vision.models import FAMILIES

CHOICES: list[dict[str, Any]] = [
    {"checkpointing": "selective"},
    {"checkpointing": 2},
    {"checkpointing": True, "offloads": True},
    {"checkpointing": "selective", "offloads": True},
]
PACKED, ULYSSES = {"attention": "sdpa", "max_tokens": 60}, {"sequence_parallel": 2}
CASES: dict[str, tuple[int, Case]] = {  # number of ranks
    "adapters on parts of sequences": (2, replace(ROLES["adapters"], **PACKED, **ULYSSES)),
    "shared prompts": (1, replace(ROLES["full KL"], **PACKED, shares_prompts=True)),
    "critic": (1, replace(ROLES["critic"], max_tokens=40)),
    "SFT": (2, replace(ROLES["SFT"], max_tokens=40, dtype="bfloat16")),
    "DPO": (2, replace(ROLES["DPO"], **PACKED)),
    "reward model training": (1, ROLES["reward model training"]),
    "balanced experts": (2, Case("qwen3_moe", {"entropy_coeff": 0.1}, "sdpa", aux=0.5, replay=True, max_tokens=60)),
    "expert parallelism": (2, Case("qwen3_moe", {"fsdp_config": {"ep_size": 2}}, max_tokens=60)),
    "caps and windows": (1, Case("gemma2", max_tokens=60)),
    "trained tower": (1, ROLES[next(iter(FAMILIES))]),
}


@pytest.mark.parametrize("name", at_night(CASES, ["adapters on parts of sequences", "balanced experts"]))
def test_gradients_are_those_without_recomputation(locate: Any, name: str) -> None:
    num_ranks, case = CASES[name]
    cases = [locate(case), *(replace(locate(case), **choice) for choice in CHOICES)]
    for plain, *others in run_on_ranks(compute, num_ranks, cases):
        assert max(np.abs(gradient).max() for gradient in plain.gradients.values()) > 1e-4
        for choice, other in zip(CHOICES, others, strict=True):
            assert other.gradients.keys() == plain.gradients.keys()
            for parameter, gradient in plain.gradients.items():
                np.testing.assert_array_equal(other.gradients[parameter], gradient, err_msg=f"{choice} {parameter}")
