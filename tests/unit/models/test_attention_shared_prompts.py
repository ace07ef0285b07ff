"""The shared-prompt layout by hand, and its values and kernels compared with the plain one. test_architectures.py has
log-probs and gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from alphaapollo.batching.batch import Rows
from alphaapollo.batching.shared_prompts import SharedPrompts, find_shared_prompts
from alphaapollo.config.schema import Model
from alphaapollo.models import attention as backends
from alphaapollo.models.attention import make_causal_mask
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder, Packing, make_rows
from alphaapollo.models.policy import ValueModel
from alphaapollo.types import Row

CPU = torch.device("cpu")


def draw_rows(seed: int, prompt: int, response: int) -> Rows:
    """Groups of one to five samples."""
    generator = np.random.default_rng(seed)
    rows, groups = [], []
    for group in range(4):
        start = generator.integers(2, 48, generator.integers(1, prompt + 1)).tolist()
        for _ in range(generator.integers(1, 6)):
            tokens = start + generator.integers(2, 48, generator.integers(1, response + 1)).tolist()
            mask = [int(i >= len(start)) for i in range(len(tokens))]
            rows.append(Row(tokens, mask, [0.0] * len(tokens), [len(tokens) - 1]))
            groups.append(group)
    return replace(Rows.from_rows(rows), shared_prompts=find_shared_prompts(rows, groups))


def test_values_are_those_of_the_plain_layout(model_folder):
    model, rows = Model(path=str(model_folder("qwen3"))), draw_rows(2, 9, 9)
    builder = MicroBatchBuilder(True, CPU)
    shared, plain = (builder.build(one, range(len(rows))) for one in (rows, replace(rows, shared_prompts=None)))
    with torch.no_grad():
        critic = ValueModel(load_causal_lm(model, "padded"), seed=0)
        torch.testing.assert_close(critic(shared), critic(plain), rtol=1e-4, atol=1e-5)


def three_rows() -> Rows:
    """[5, 6 | 7, 8], [5, 6 | 9] share two tokens; [4 | 3, 2] shares none."""
    rows = [np.array(ids) for ids in ([5, 6, 7, 8], [5, 6, 9], [4, 3, 2])]
    return make_rows(rows, [2, 2, 1], SharedPrompts(np.array([0, 0, 1]), np.array([2, 2, 1])))


def test_shared_layout_by_hand():
    micro = MicroBatchBuilder(True, CPU).build(three_rows(), [0, 1, 2])
    assert micro.token_ids.tolist() == [[5, 6, 4, 7, 8, 9, 3, 2]]
    assert micro.position_ids.tolist() == [[0, 1, 0, 2, 3, 2, 1, 2]]
    predicting = micro.predicting_tokens.shard_positions.tolist()
    assert predicting == [1, 3, 1, 2, 6]  # the prompt's last state predicts two first tokens
    assert micro.last_tokens.shard_positions.tolist() == [4, 5, 7]
    assert micro.targets.tolist() == [7, 8, 9, 3, 2]
    part_of_a_group = MicroBatchBuilder(True, CPU).build(three_rows(), [1, 2])
    assert part_of_a_group.token_ids.tolist() == [[5, 6, 4, 9, 3, 2]]


def draw_states() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, 8, 6) for heads in (4, 2, 2)]


def test_packed_kernels_get_the_prefixes_as_keys(monkeypatch: pytest.MonkeyPatch):
    """varlen gets the prefix of each segment and the segment as keys."""
    packing = MicroBatchBuilder(False, CPU).build(three_rows(), [0, 1, 2]).packing
    assert packing is not None
    query, key, value = draw_states()

    def kernel(query, key, value, cu_q, cu_k, max_q, max_k, scale=None, window_size=(-1, -1), enable_gqa=False):
        """Bottom-right causal, as the kernel is documented."""
        assert (max_q, max_k, enable_gqa) == (2, 4, True)
        outputs = []
        spans = (pairwise(offsets.tolist()) for offsets in (cu_q, cu_k))
        for (q0, q1), (k0, k1) in zip(*spans, strict=True):
            own = (x[None].transpose(1, 2) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
            mask = make_causal_mask(q1 - q0, k1 - k0, None, CPU)
            attended = torch.nn.functional.scaled_dot_product_attention(*own, attn_mask=mask, enable_gqa=True)
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    call = backends.AttentionCall("Layer", query, key, value, packing=packing)
    expected = backends.BACKENDS["sdpa"](call)
    torch.testing.assert_close(backends.BACKENDS["varlen"](call), expected)
    torch.testing.assert_close(backends.BACKENDS["padded"](call), expected)


@pytest.mark.parametrize("extra", [{"window": 3}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}])
def test_windows_caps_and_sinks(extra: dict[str, Any]):
    """Compare each single row with its tokens in the shared layout."""
    rows = three_rows()
    micro = MicroBatchBuilder(True, CPU).build(rows, [0, 1, 2])
    flat = [[0, 1, 3, 4], [0, 1, 5], [2, 6, 7]]  # positions of each row's tokens
    query, key, value = draw_states()
    for compute in (backends._attend_padded, backends._attend_sdpa):
        ours = compute(backends.AttentionCall("Layer", query, key, value, packing=micro.packing, **extra))
        for places in flat:
            own = [x[:, :, places] for x in (query, key, value)]
            packing = Packing(torch.tensor([0, len(places)], dtype=torch.int32), [len(places)])
            expected = backends._attend_sdpa(backends.AttentionCall("Layer", *own, packing=packing, **extra))
            torch.testing.assert_close(ours[:, places], expected)
