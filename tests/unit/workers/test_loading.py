"""Slices that ranks read from files are those of a model that rank 0 loads and sends."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from alphaapollo.models import file_tensors, sharding
from alphaapollo.models.file_tensors import load_for_ranks
from alphaapollo.models.sharding import local_tensor
from tests.nightly import at_night
from tests.quantized import save_quantized
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.roles import IMAGES
from tests.unit.workers.training import Case

MOE = Case("qwen3_moe", actor={"fsdp_config": {"ep_size": 2}})
LAYOUTS: dict[str, tuple[int, list[tuple[Case, int]]]] = {  # ranks; cases, and numbers of parameters that rank 0 sends
    "alone": (1, [(Case("qwen3"), 0), (Case("qwen3_moe", dtype="bfloat16"), 0)]),
    "uneven": (
        3,
        [
            (Case("qwen3", dtype="bfloat16"), 0),
            (Case("llama", lora_rank=4), 28),  # the adapters
            (Case("qwen3", role="critic"), 2),  # its head
            (Case("qwen3", role="reward"), 1),  # a new head
            (Case("qwen3", role="reward_model"), 0),
            (Case("quantized", lora_rank=4, dtype="bfloat16"), 56),  # also codes and scales
            (Case("qwen2_5_vl", **IMAGES), 0),
        ],
    ),
    "copies": (4, [(Case("qwen3", actor={"fsdp_config": {"fsdp_size": 2}}), 0)]),
    "experts": (4, [(MOE, 0), (replace(MOE, actor={"fsdp_config": {"fsdp_size": 2, "ep_size": 2}}), 0)]),
}


def load_slices(rank: int, num_ranks: int, address: str, case: Case, way: str) -> tuple[dict[str, np.ndarray], int]:
    """Slices of a worker's parameters, its buffers, and the number of parameters that rank 0 has sent."""
    sent = []

    def distribute(full: torch.Tensor, *arguments: Any, **keys: Any) -> Any:
        sent.append(full)
        return _distribute(full, *arguments, **keys)

    _distribute = sharding.distribute_tensor
    with (
        mock.patch.object(sharding, "distribute_tensor", distribute),
        mock.patch.object(sharding, "load_for_ranks", nullcontext if way == "sent" else load_for_ranks),
        mock.patch.object(file_tensors.socket, "gethostname", lambda: f"node {rank % 2}"),
        mock.patch.object(file_tensors, "digest_file", lambda file: f"{file} {way == 'other files' and rank % 2}"),
    ):
        worker = training.make_worker(case, rank, num_ranks, address)
    module = worker.policy if case.role == "policy" else worker.model
    named = [*module.named_parameters(), *module.named_buffers()]
    slices = {name: local_tensor(tensor.detach()).float().numpy().copy() for name, tensor in named}
    worker.close()
    return slices, len(sent)


@pytest.mark.parametrize("layout", at_night(LAYOUTS, ["uneven"]))
def test_ranks_read_the_slices_that_rank_0_would_send(locate, model_folder, tmp_path: Path, layout: str) -> None:
    num_ranks, counted = LAYOUTS[layout]
    quantized = save_quantized(model_folder("llama"), tmp_path)[0] if layout == "uneven" else ""
    for case, num_sent in counted:
        case = replace(case, folder=str(quantized)) if case.folder == "quantized" else locate(case)
        ways = [run_ranks(load_slices, num_ranks, case, way) for way in ("read", "sent", "other files")]
        for read, sent, unshared in zip(*ways, strict=True):
            for slices, _ in (sent, unshared):
                assert slices.keys() == read[0].keys()
                for name, values in slices.items():
                    np.testing.assert_array_equal(read[0][name], values, err_msg=name)
            assert read[1] == num_sent < sent[1] and unshared[1] == (sent[1] if num_ranks > 1 else num_sent)
