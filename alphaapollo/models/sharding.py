"""FSDP2: each rank keeps a slice of every parameter, float32 for the optimizer, and gathers one decoder layer at a
time in the dtype of the arithmetic. One rank is the same code with whole slices.

    mesh [shard]             all ranks hold one copy of the model
    mesh [replicate, shard]  consecutive ranks hold one copy, the others further ones (HSDP)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from alphaapollo.utils.network import interface_to, take_held

MIN_UNIT = 2**19  # parameters; gathering a smaller layer on its own costs more time than it saves memory
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
PATIENCE = timedelta(hours=1)  # of a rank that waits for another which loads or writes a large model


def join_process_group(device: str, rank: int, world_size: int, init_method: str) -> None:
    """Meet the other ranks at `init_method`: tcp://host:port, where rank 0 holds the port (`network.hold_port`);
    file://path; one rank alone meets nobody. A second model in one process shares the group.

    Gloo is told the network that leads to the meeting point: by itself it takes the address of the host's name, which
    on many machines is loopback. The group is bound to no `device_id`: ranks wait for each other over gloo, and NCCL
    takes the device of the tensors, which `workers.base.join` has set.
    """
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        return
    if interface := interface_to(urlsplit(init_method).hostname or ""):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    where = _where_they_meet(rank, world_size, init_method)
    dist.init_process_group(BACKENDS[device], rank=rank, world_size=world_size, timeout=PATIENCE, **where)


def _where_they_meet(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """As arguments of torch's init_process_group."""
    if world_size == 1:
        return {"store": dist.HashStore()}  # type: ignore[attr-defined]
    at = urlsplit(init_method)
    if at.scheme != "tcp":
        return {"init_method": init_method}
    assert at.hostname and at.port
    first, listening = rank == 0, take_held(at.port) if rank == 0 else None
    store = dist.TCPStore(at.hostname, at.port, world_size, first, PATIENCE, master_listen_fd=listening)  # type: ignore[attr-defined]
    return {"store": store}


def make_mesh(device: str, fsdp_size: int = -1) -> DeviceMesh:
    """`fsdp_size`: ranks that hold one copy of the model, a divisor of all; -1 = all (a collective)."""
    world_size = dist.get_world_size()
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device, (world_size,), mesh_dim_names=("shard",))
    assert world_size % fsdp_size == 0, "config/check_parallelism.py sees to it"
    return init_device_mesh(device, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    offload_policy: bool,
    forward_methods: Iterable[str] = (),
    exact: Iterable[nn.Module] = (),
) -> None:
    """Shard `layers` and `model`, in place, and give every rank its slices of rank 0's weights.

    Rank 0 comes with weights on the CPU, the others with meta tensors.

    Args:
        dtype: of forward and backward; gradients are reduced in float32 (float64 stays).
        offload_policy: FSDP2's own: slices, gradients and the optimizer's step stay in host memory (GPU only).
        forward_methods: of `model`, besides forward, that use parameters.
        exact: modules of `model` that compute so, too, called as modules.
    """
    # Not the parameters themselves: FSDP moves those to the GPU in place, where whatever is held on to stays whole.
    sends = mesh.size() > 1 and dist.get_rank() == 0
    named = (*model.named_parameters(), *model.named_buffers()) if sends else ()
    tensors = {name: tensor.detach() for name, tensor in named}
    device = torch.device(mesh.device_type)
    exactly = torch.promote_types(dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=exactly)
    policy = CPUOffloadPolicy() if offload_policy and device.type == "cuda" else OffloadPolicy()
    for layer in layers:
        if sum(parameter.numel() for parameter in layer.parameters()) < MIN_UNIT:
            continue
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=policy)
    full = MixedPrecisionPolicy(param_dtype=exactly, reduce_dtype=exactly)
    for module in exact:
        fully_shard(module, mesh=mesh, mp_policy=full, offload_policy=policy)
    # The root holds embedding and head, which the backward pass needs first: keep them gathered until then.
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=policy, reshard_after_forward=False)
    for method in forward_methods:
        register_fsdp_forward_method(model, method)
    if mesh.size() > 1:
        dist.barrier()  # over gloo, with patience: NCCL's own would end while rank 0 still reads the weights
        _scatter(model, tensors, mesh, torch.device("cpu") if isinstance(policy, CPUOffloadPolicy) else device)


@torch.no_grad()
def _scatter(model: nn.Module, tensors: dict[str, Tensor], mesh: DeviceMesh, home: torch.device) -> None:
    """Rank 0's `tensors` to all ranks: parameters by slices, buffers whole."""
    device = torch.device(mesh.device_type)
    is_source = dist.get_rank() == 0
    if not is_source:
        model.to_empty(device=home)

    def whole(name: str, like: Tensor) -> Tensor:
        if is_source:
            return tensors.pop(name).detach().to(device)
        return torch.empty(like.shape, dtype=like.dtype, device=device)

    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        slices = distribute_tensor(whole(name, parameter), mesh, parameter.placements, src_data_rank=0)
        parameter.to_local().copy_(slices.to_local())
    buffers = [(name, *_owner(model, name), buffer) for name, buffer in model.named_buffers()]
    for name, module, key, buffer in buffers:  # on the device, also where slices rest in host memory
        full = whole(name, buffer)
        dist.broadcast(full, 0)
        module._buffers[key] = full


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a buffer, and the buffer's name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def reshard(model: nn.Module) -> None:
    """Drop what a forward pass without backward left gathered: it would outlive the next change of the weights."""
    cast(FSDPModule, model).reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """A parameter gathered from all ranks, on their device (a collective)."""
    if not isinstance(tensor, DTensor):
        return tensor
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()


def shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks that together hold one copy of it; None: all."""
    return tensor.device_mesh.get_group("shard") if isinstance(tensor, DTensor) else None


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's slice, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
