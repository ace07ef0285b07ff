"""A vision-language model on two ranks, with FSDP and with sequence parallelism, compared with plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import Rows
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.config.schema import Model
from alphaapollo.models import sharding
from alphaapollo.models.micro_batch import MicroBatchBuilder, create_sequence_groups
from alphaapollo.models.policy import load_policy
from alphaapollo.models.sharding import full_tensor, join_process_group, make_mesh
from tests.unit.tiny import run_ranks
from tests.vision.models import FAMILIES
from tests.vision.rows import compute_plain_logprobs, load_plain, make_rows_with_images

WEIGHTS = [0.5, -1.0, 2.0, 1.0, -0.5]  # of the rows' log-probs in the loss


def compute_all(rank: int, num_ranks: int, address: str, folder: str) -> list[list[Any]]:
    join_process_group("cpu", rank, num_ranks, address)
    sharding.MIN_UNIT = 0
    return [compute(rank, num_ranks, folder, size) for size in (1, 2)]


def compute(rank: int, num_ranks: int, folder: str, size: int) -> list[Any]:
    """Gradients and log-probs in each layout. Without sequence parallelism, rank 1 has the row without images."""
    sequence, _ = create_sequence_groups("cpu", size)
    rows = make_rows_with_images(Path(folder))
    chosen = list(range(len(rows))) if sequence else [[0, 1, 3, 4], [2]][rank]
    results: list[Any] = []
    for attention, shares in (("padded", False), ("sdpa", False), ("sdpa", True)):
        model = Model(path=folder, attention=attention, freeze_vision=False)
        policy = load_policy(model, make_mesh("cpu"), torch.float32, offload_policy=False, adapter_seed=0)
        prefixes = find_shared_prompts(rows, [0] * len(rows)) if shares else None
        batch = Rows.from_rows(rows, prefixes)
        micro = MicroBatchBuilder(attention == "padded", torch.device("cpu"), sequence).build(batch, chosen)
        logprobs = policy(micro, 1.0).logprobs
        weights = torch.from_numpy(np.repeat(np.array(WEIGHTS)[chosen], batch.response_lengths[chosen]))
        loss = (logprobs * micro.mask * weights).sum().float()
        (loss * num_ranks).backward()
        gradients = {name: full_tensor(one.grad).numpy() for name, one in policy.model.named_parameters()}
        results.append((gradients, logprobs[micro.mask.bool()].detach().numpy()))
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_transformers(vision_folder, family: str):
    folder = vision_folder(family)
    rows, plain = make_rows_with_images(folder), load_plain(folder)
    parts = [
        compute_plain_logprobs(plain, row)[torch.tensor(row.action_mask[row.response_start :]).bool()] for row in rows
    ]
    sum(weight * part.sum() for weight, part in zip(WEIGHTS, parts, strict=True)).backward()  # type: ignore[union-attr]
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    logprobs = torch.cat(parts).detach()
    for size, first, second in zip((1, 2), *run_ranks(compute_all, 2, str(folder), timeout=150), strict=True):
        for (gradients, found), (_, other) in zip(first, second, strict=True):
            for name, gradient in gradients.items():
                torch.testing.assert_close(torch.from_numpy(gradient), expected[name], rtol=1e-3, atol=2e-5)
            if size == 2:
                torch.testing.assert_close(torch.from_numpy(found), logprobs, rtol=0, atol=1e-5)
                np.testing.assert_array_equal(found, other)
