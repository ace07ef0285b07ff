"""Slices that ranks read from files are those of a model that rank 0 loads and sends."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models import file_tensors, sharding
from alphaapollo.models.file_tensors import load_for_ranks
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.sharding import local_tensor
from tests.architectures.models import ARCHITECTURES, Architecture
from tests.quantized import save_quantized
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.roles import IMAGES
from tests.unit.workers.training import Case

STACKED = {"qwen2_moe", "qwen3_moe", "qwen3_next", "phimoe", "deepseek_v3"}  # files have one tensor per expert
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
    "copies and experts": (
        4,
        [
            (Case("qwen3", actor={"fsdp_config": {"fsdp_size": 2}}), 0),
            (Case("qwen3_moe", actor={"fsdp_config": {"ep_size": 2}}), 0),
            (Case("qwen3_moe", actor={"fsdp_config": {"ep_size": 4}}), 0),
            (Case("qwen3_moe", actor={"fsdp_config": {"fsdp_size": 2, "ep_size": 2}}), 0),
        ],
    ),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_marked_parameters_have_the_values_of_the_files(architecture: Architecture, tmp_path: Path) -> None:
    model = Model(path=str(architecture.save(tmp_path)), attention="padded")
    try:
        expected = {name: parameter.data for name, parameter in load_causal_lm(model, "padded").named_parameters()}
    except ValueError:
        return  # the architecture is refused
    with load_for_ranks():
        loaded = dict(load_causal_lm(model, "padded").named_parameters())
    assert loaded.keys() == expected.keys()
    marks = {name: one.file_tensor for name, one in loaded.items() if hasattr(one, "file_tensor")}
    for name in expected.keys() - marks.keys():
        assert loaded[name].equal(expected[name])
    for name, tensor in marks.items():
        full, rows = expected[name], slice(1, 1 + len(expected[name]) // 2)
        assert tensor.read().equal(full) and tensor.dtype == full.dtype
        assert tensor.read([rows]).equal(full[rows])
        columns = [slice(0, size // 2 + 1) for size in full.shape[1:]]
        assert tensor.read([rows, *columns]).equal(full[(rows, *columns)])
    experts = [name for name, tensor in marks.items() if tensor.converter]
    assert bool(experts) is (architecture.family in STACKED)
    assert all(loaded[name].untyped_storage().nbytes() <= 8 for name in experts)  # rank 0 has not merged them


Slices = dict[str, np.ndarray]


def load_slices(case: Case, rank: int, num_ranks: int, address: str) -> tuple[Slices, int, int]:
    """Slices of a worker's parameters and its buffers, number of parameters that rank 0 has sent, and of elements that
    this rank has read."""
    read, sent = [], []

    def read_tensor(*arguments: Any) -> torch.Tensor:
        read.append(_read(*arguments))
        return read[-1]

    def distribute(full: torch.Tensor, *arguments: Any, **keys: Any) -> Any:
        sent.append(full)
        return _distribute(full, *arguments, **keys)

    _read, _distribute = file_tensors.read_tensor, sharding.distribute_tensor
    with (
        mock.patch.object(file_tensors, "read_tensor", read_tensor),
        mock.patch.object(sharding, "distribute_tensor", distribute),
    ):
        worker = training.make_worker(case, rank, num_ranks, address)
    module = worker.policy if case.role == "policy" else worker.model
    named = [*module.named_parameters(), *module.named_buffers()]
    slices = {name: local_tensor(tensor.detach()).float().numpy().copy() for name, tensor in named}
    worker.close()
    return slices, len(sent), sum(tensor.numel() for tensor in read)


def load_three_ways(
    rank: int, num_ranks: int, address: str, cases: list[Case]
) -> list[tuple[tuple[Slices, int, int], ...]]:
    results = []
    for number, case in enumerate(cases):
        meeting = f"{address}_{number}"
        read = load_slices(case, rank, num_ranks, meeting)
        with mock.patch.object(sharding, "load_for_ranks", nullcontext):  # rank 0 loads all
            sent = load_slices(case, rank, num_ranks, f"{meeting}_sent")
        node = rank % 2  # in the first case the second node has other files
        digest = partial("{1} {0}".format, node if number == 0 else "")
        with (
            mock.patch.object(file_tensors.socket, "gethostname", lambda node=node: f"node {node}"),
            mock.patch.object(file_tensors, "digest_file", digest),
        ):
            results.append((read, sent, load_slices(case, rank, num_ranks, f"{meeting}_nodes")))
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_read_the_slices_that_rank_0_would_send(locate, model_folder, tmp_path: Path, layout: str) -> None:
    num_ranks, counted = LAYOUTS[layout]
    quantized = save_quantized(model_folder("llama"), tmp_path)[0] if layout == "uneven" else ""
    cases = [replace(case, folder=str(quantized)) if case.folder == "quantized" else case for case, _ in counted]
    cases = [locate(case) for case in cases]
    for rank, results in enumerate(run_ranks(load_three_ways, num_ranks, cases, timeout=300)):
        for case, (_, num_sent), (read, sent, from_nodes) in zip(cases, counted, results, strict=True):
            for slices, *_ in (sent, from_nodes):
                assert slices.keys() == read[0].keys()
                for name, values in slices.items():
                    np.testing.assert_array_equal(read[0][name], values, err_msg=f"{case.folder} {name}")
            own = sum(values.size for values in read[0].values())
            splits_rows = num_ranks > case.actor.get("fsdp_config", {}).get("ep_size", num_ranks)  # of a rank's experts
            assert read[1] == num_sent and read[2] <= own * (1 + splits_rows)
            assert sent[1] > num_sent and sent[2] == 0
            if num_ranks > 1 and case is cases[0]:
                assert from_nodes[1] == sent[1] and (from_nodes[2] == 0) is (rank > 0)
            else:
                assert from_nodes[1:] == read[1:]
