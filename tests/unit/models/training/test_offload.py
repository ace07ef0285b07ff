"""Offloading on a CPU, with host memory on both sides."""

from __future__ import annotations

import torch
from torch import nn

from alphaapollo.models.train_state import TensorOffloader, make_parameter_offloader


def bytes_of(tensors: list[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def test_an_offloaded_tensor_has_no_memory_and_stays_the_same_object() -> None:
    storage = torch.arange(12.0)
    parameter, view = nn.Parameter(storage.view(3, 4)), storage[2:5]
    offload = TensorOffloader(lambda: [parameter, view], enabled=True)
    offload.offload()
    assert bytes_of([parameter, view]) == 0 and parameter.shape == (3, 4)
    offload.offload()
    offload.reload()
    offload.reload()
    assert torch.equal(parameter, torch.arange(12.0).view(3, 4)) and view.tolist() == [2.0, 3.0, 4.0]
    parameter.data.mul_(2)
    offload.offload()
    offload.reload()
    assert view.tolist() == [4.0, 6.0, 8.0]


def test_new_and_removed_tensors() -> None:
    """Like optimizer state: none before the first step, other tensors after a checkpoint is loaded."""
    state: list[torch.Tensor] = []
    offload = TensorOffloader(lambda: state, enabled=True)
    offload.offload()
    offload.reload()
    state.append(torch.ones(4))
    offload.offload()
    assert bytes_of(state) == 0
    offload.reload()
    state[0] = torch.full((4,), 2.0)
    offload.offload()
    offload.reload()
    assert state[0].tolist() == [2.0] * 4 and len(offload._copies) == 1


def test_nothing_moves_if_disabled_or_not_on_a_gpu() -> None:
    model = nn.Linear(2, 2)
    for offload in (TensorOffloader(model.parameters, enabled=False), make_parameter_offloader(model, enabled=True)):
        offload.offload()
        assert bytes_of(list(model.parameters())) == 6 * 4
    assert not make_parameter_offloader(None, enabled=True).enabled


def test_lora_adapters_stay_on_the_device() -> None:
    adapter = nn.ModuleDict({"default": nn.Linear(2, 1)})
    layer = nn.ModuleDict({"proj": nn.Linear(2, 3).requires_grad_(False), "lora_A": adapter})
    offloader = make_parameter_offloader(nn.ModuleDict({"layer": layer}), enabled=True)
    assert [*map(id, offloader._list_tensors())] == [*map(id, layer["proj"].parameters())]


def test_a_trained_model_with_a_frozen_part_is_offloaded_completely() -> None:
    """A frozen vision tower beside a trained language model."""
    model = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))
    assert len([*make_parameter_offloader(model, enabled=True)._list_tensors()]) == 4
