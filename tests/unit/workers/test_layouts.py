"""What a worker computes depends neither on micro-batches, attention and recomputation, nor on the ranks that share
rows, sequences and the model. Other tests compare one rank with plain transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.nightly import at_night
from tests.unit.workers.layouts import check_layouts
from tests.unit.workers.roles import FULL, RICH, ROLES
from tests.unit.workers.training import Case
from tests.vision.models import FAMILIES

SMALL, PACKED, SHARED = {"max_tokens": 40}, {"attention": "sdpa", "max_tokens": 60}, {"sequence_parallel": 2}
LAYOUTS: dict[int, list[dict[str, Any]]] = {  # by the number of ranks, of which the second may have no row
    1: [{**SMALL, "checkpointing": True, "order": 1}, PACKED],
    2: [SMALL, {"num_rows": 1}, {**SMALL, **SHARED}, {**PACKED, **SHARED}],
}
VISION = {*FAMILIES}
PREFERENCES = {"DPO", "KTO", "reward model training"}


@pytest.mark.parametrize("name", at_night(ROLES, ["teachers by row", "qwen2_5_vl", "internvl"]))
def test_every_role_in_every_layout(locate, name: str):
    layouts = dict(LAYOUTS)
    if name in VISION:
        layouts[2] = [*layouts[2], {"num_rows": 2}]  # the second rank has no image
    if name in VISION | PREFERENCES:
        layouts[2] = [*layouts[2], {**PACKED, "shares_prompts": True}, {**PACKED, **SHARED, "shares_prompts": True}]
    alone = check_layouts(locate(ROLES[name]), layouts)
    assert name == "reward model" or max(np.abs(gradient).max() for gradient in alone.gradients.values()) > 1e-3


ONE_UNIT = {"min_unit": 10**9}  # all layers are gathered at once
ULYSSES = replace(ROLES["full KL"], **PACKED, **SHARED)
FOUR = replace(ROLES["full KL"], **{**PACKED, **SHARED, **SMALL})
EXPERTS = Case("qwen3_moe", {"entropy_coeff": 0.1}, aux=0.5, replay=True)
COPIES = {"fsdp_size": 1, "sync_each_micro_batch": False}
OTHERS: dict[str, tuple[int, Case]] = {
    "loss of rows": (
        2,
        Case("qwen3", RICH | {"policy_loss": {"loss_mode": "gspo"}}, "sdpa", checkpointing=True, **SHARED),
    ),
    "old log-probs of the update": (2, replace(ULYSSES, records_old=True, mini_batch_size=5)),
    "one unit, one row each": (2, Case("qwen3", RICH, max_tokens=1, **SHARED, **ONE_UNIT)),
    "one unit, recomputed": (2, Case("qwen3", RICH, checkpointing=True, **SMALL, **ONE_UNIT)),
    "caps and windows": (2, replace(ULYSSES, folder="gemma2")),
    "three key heads": (2, replace(ULYSSES, folder="three_key_heads")),
    "experts, one row": (2, Case("qwen3_moe", RICH, num_rows=1)),
    "experts, one shared row": (2, Case("qwen3_moe", FULL, needs_reference=True, num_rows=1, **SHARED)),
    "balanced experts": (2, replace(EXPERTS, attention="sdpa")),
    "balanced experts, one row": (2, replace(EXPERTS, attention="sdpa", num_rows=1)),
    "balanced experts, packed and shared": (2, replace(EXPERTS, attention="sdpa", **SHARED)),
    "balanced experts, padded and shared": (2, replace(EXPERTS, checkpointing=True, **SHARED)),
    "balanced experts, one unit": (2, replace(EXPERTS, attention="sdpa", checkpointing=True, **ONE_UNIT)),
    "adapters in one unit": (1, replace(ROLES["adapters"], checkpointing=True, **ONE_UNIT)),
    "adapters, copies": (2, replace(ROLES["adapters"], actor=FULL | {"fsdp_config": COPIES}, **SMALL)),
    "adapters on ranks that do not divide them": (3, replace(ROLES["adapters"], checkpointing=True, **SMALL)),
    "adapters in one unit on three": (3, replace(ROLES["adapters"], **ONE_UNIT)),
    "two groups of two": (4, FOUR),
    "two groups, padded": (4, replace(ROLES["ppo"], **{**SMALL, **SHARED})),
    "two groups, one row": (4, replace(FOUR, num_rows=1)),
    "two copies": (4, replace(FOUR, actor=FULL | {"fsdp_config": COPIES | {"fsdp_size": 2}})),
    "one group of four, more than key heads": (4, replace(FOUR, sequence_parallel=4)),
    "one group of four, padded": (4, replace(FOUR, attention="padded", sequence_parallel=4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_losses_and_groups_of_ranks(locate, name: str):
    num_ranks, case = OTHERS[name]
    check_layouts(locate(case), {num_ranks: [{}]})


def test_kept_tokens_in_every_layout(locate):
    sharing = {**PACKED, "shares_prompts": True}
    layouts = {1: [{**SMALL, "order": 1}, PACKED, sharing], 2: [{**PACKED, **SHARED}, {**sharing, **SHARED}]}
    check_layouts(locate(replace(ROLES["full KL"], kept=True)), layouts)
