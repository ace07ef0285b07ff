"""Sequence-parallel attention compared with attention, and models that do not support it."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.models.attention import backends
from alphaapollo.models.micro_batch import Packing
from alphaapollo.models.ulysses import check_ulysses_support, create_sequence_groups
from tests.unit.tiny import run_ranks

KEY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"

CASES: list[dict[str, Any]] = [
    {"heads": 4, "groups": 2},
    {"heads": 4, "groups": 4, "window": 3},
    {"heads": 2, "groups": 1, "softcap": 2.0},  # one key head: repeated
    {"heads": 6, "groups": 3, "sinks": True},  # three key heads over two ranks: repeated
    {"heads": 4, "groups": 2, "dtype": torch.bfloat16},
]


def draw(case: dict[str, Any]) -> list[Tensor]:
    """query, key, value [1, h, 8, 6] and sinks [heads]."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, case["heads"], 8, 6), (1, case["groups"], 8, 6), (1, case["groups"], 8, 6), (case["heads"],)]
    dtype = case.get("dtype", torch.float32)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def attend(case: dict[str, Any], kind: str, tensors: list[Tensor], **more: Any) -> Tensor:
    interface = backends.make_attention_interface(backends.BACKENDS[kind])
    packing = Packing(torch.tensor([0, 5, 8], dtype=torch.int32), [5, 3]) if kind == "sdpa" else None
    *states, sinks = tensors
    return interface(
        torch.nn.Linear(1, 1),
        *states,
        attention_mask=None,
        sliding_window=case.get("window"),
        softcap=case.get("softcap"),
        s_aux=sinks if case.get("sinks") else None,
        packing=packing,
        **more,
    )[0]


def by_parts(rank: int, num_ranks: int, address: str) -> list[list[Tensor | None]]:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    sequence, data = create_sequence_groups("cpu", num_ranks)
    assert sequence is not None and data is not None
    assert (sequence.rank, sequence.size, data.size()) == (rank, num_ranks, 1)
    found = []
    for case, kind in itertools.product(CASES, ("padded", "sdpa")):
        tensors = draw(case)
        own = [one[:, :, sequence.get_token_range(8)] for one in tensors[:3]]
        output = attend(case, kind, [*own, tensors[3]], sequence=sequence)
        output.float().square().sum().backward()
        found.append([output.detach(), *(one.grad for one in tensors)])
    return found


@pytest.mark.timeout(200)
def test_sequence_parallel_attention_equals_attention():
    ranks = run_ranks(by_parts, 2, timeout=150)
    layouts = itertools.product(CASES, ("padded", "sdpa"))
    for (case, kind), *parts in zip(layouts, *ranks, strict=True):
        tensors = draw(case)
        output = attend(case, kind, tensors)
        output.float().square().sum().backward()
        tolerance = {"atol": 0.05, "rtol": 0.05} if case.get("dtype") else {"atol": 1e-6, "rtol": 1e-5}
        torch.testing.assert_close(torch.cat([part[0] for part in parts], dim=1), output.detach(), **tolerance)
        for index, tensor in enumerate(tensors, start=1):
            grads = [part[index] for part in parts]
            if tensor.grad is None:
                assert grads == [None, None]
            else:
                torch.testing.assert_close(sum(grads), tensor.grad, **tolerance)


def config(**fields: Any) -> Any:
    text = SimpleNamespace(**({"num_attention_heads": 14} | fields))
    return SimpleNamespace(model_type="qwen3", get_text_config=lambda: text)


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({}, f"14 attention heads. Set {KEY}=2."),
        ({"num_attention_heads": 0}, "0 attention heads"),
        ({"num_attention_heads": 8, "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"num_attention_heads": 8, "custom_code": True}, "modeling code"),
    ],
)
def test_models_that_do_not_support_ulysses(fields: dict[str, Any], fact: str):
    with pytest.raises(ValueError, match=f"{KEY}=4 .*{re.escape(fact)}"):
        check_ulysses_support(config(**fields), "some/model", 4, KEY, fields.get("custom_code", False))


def test_models_that_support_ulysses():
    check_ulysses_support(config(layer_types=["full_attention", "sliding_attention"]), "some/model", 7, KEY, False)
