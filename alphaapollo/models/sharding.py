"""FSDP2 sharding: each rank keeps a slice of every parameter and gathers one decoder layer at a time.

Slices are float32 for the optimizer; gathered layers have the dtype of forward and backward. A single rank runs the
same code with complete parameters.

    mesh [shard]             all ranks share one copy of the model
    mesh [replicate, shard]  each group of consecutive ranks shares one copy (HSDP)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast
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

from alphaapollo.models.cpu.linear import use_onednn
from alphaapollo.utils.network import find_interface, take_reserved_socket_fd

MIN_UNIT = 2**19  # parameters; gathering a smaller layer on its own costs more time than it saves memory
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # long enough for one rank to load or write a large model


class FsdpRoot(nn.Module):
    """Base class of models that `shard_model` splits over the ranks."""

    layers: Sequence[nn.Module]  # modules that are gathered one at a time, the decoder layers
    float32_modules: Sequence[nn.Module] = ()  # submodules that always compute in float32
    forward_methods: Sequence[str] = ()  # methods besides forward that use parameters


R = TypeVar("R", bound=FsdpRoot)


def join_process_group(device: str, rank: int, world_size: int, init_method: str) -> None:
    """Initialize torch.distributed for this process, unless another model in the process has done so already.

    Gloo uses the network interface that reaches rank 0, because its default is loopback on many machines. The process
    group has no `device_id`, because ranks wait for each other over gloo.

    `init_method`: tcp://host:port, with a port that rank 0 has reserved (`network.reserve_port`), or file://path. A
    single rank does not use it.
    """
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        return
    url = urlsplit(init_method)
    if interface := find_interface(url.hostname or ""):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rendezvous: dict[str, Any] = {"init_method": init_method}
    if world_size == 1:
        rendezvous = {"store": dist.HashStore()}  # type: ignore[attr-defined]
    elif url.scheme == "tcp":
        assert url.hostname and url.port
        is_first, listening = rank == 0, take_reserved_socket_fd(url.port) if rank == 0 else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            url.hostname, url.port, world_size, is_first, COLLECTIVE_TIMEOUT, master_listen_fd=listening
        )
        rendezvous = {"store": store}
    dist.init_process_group(
        BACKENDS[device], rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT, **rendezvous
    )


def make_mesh(device: str, fsdp_size: int = -1) -> DeviceMesh:
    """Create the device mesh for FSDP or HSDP (a collective). `fsdp_size` ranks share a copy of the model; -1: all."""
    world_size = dist.get_world_size()
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def shard_model(
    root: R, load_weights: Callable[[], nn.Module], mesh: DeviceMesh, dtype: torch.dtype, offload_policy: bool
) -> R:
    """Shard `root` in place, copy rank 0's weights into the slices of all ranks, and return `root` (a collective).

    Args:
        root: model on the meta device, with the dtypes of its slices.
        load_weights: loads the same model with weights, on the CPU, in any dtypes. Only rank 0 calls it.
        dtype: dtype of forward and backward. Gradients are reduced in float32, or in float64 if `dtype` is float64.
        offload_policy: use FSDP2's CPU offload: slices, gradients and optimizer state stay in host memory (GPU only).
    """
    device = torch.device(mesh.device_type)
    exact = torch.promote_types(dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=exact)
    policy = CPUOffloadPolicy() if offload_policy and device.type == "cuda" else OffloadPolicy()
    if device.type == "cpu":
        use_onednn(root)
    for layer in root.layers:
        if sum(parameter.numel() for parameter in layer.parameters()) >= MIN_UNIT:
            fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=policy)
    for module in root.float32_modules:
        exact_precision = MixedPrecisionPolicy(param_dtype=exact, reduce_dtype=exact)
        fully_shard(module, mesh=mesh, mp_policy=exact_precision, offload_policy=policy)
    # The root unit has the embedding and the head. It stays gathered because the backward pass starts with the head.
    fully_shard(root, mesh=mesh, mp_policy=precision, offload_policy=policy, reshard_after_forward=False)
    for method in root.forward_methods:
        register_fsdp_forward_method(root, method)
    source = load_weights() if dist.get_rank() == 0 else None
    dist.barrier()  # over gloo with its long timeout: NCCL's would expire while rank 0 still reads the weights
    _scatter_weights(root, source, mesh, torch.device("cpu") if isinstance(policy, CPUOffloadPolicy) else device)
    return root


@torch.no_grad()
def _scatter_weights(model: nn.Module, source: nn.Module | None, mesh: DeviceMesh, slice_device: torch.device) -> None:
    """Send slices of rank 0's parameters, and copies of its buffers, to all ranks (a collective). `source`: the model
    with weights; None on other ranks. Its parameters are moved one at a time, and converted on the device."""
    device = torch.device(mesh.device_type)
    model.to_empty(device=slice_device)
    weights = dict(source.named_parameters()) if source else {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if source:
            full = weights[name].data.to(device).to(parameter.dtype)
            weights[name].data = torch.empty(0)  # frees the memory
        else:
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        slices = distribute_tensor(full, mesh, parameter.placements, src_data_rank=0)
        parameter.to_local().copy_(slices.to_local())
    buffers = [dict(source.named_buffers()) if source else None]  # small, with the dtypes of the source
    dist.broadcast_object_list(buffers, 0)
    for name, buffer in cast(dict[str, Tensor], buffers[0]).items():
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._buffers[key] = buffer.to(device)


def reshard(model: nn.Module) -> None:
    """Free the full parameters that a forward pass without backward leaves gathered. Call it before optimizer steps."""
    cast(FSDPModule, model).reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded parameter from all ranks onto the GPU, or onto the CPU without GPUs (a collective)."""
    if not isinstance(tensor, DTensor):
        return tensor
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's slice of a sharded parameter, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
