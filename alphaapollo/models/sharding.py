"""FSDP2 sharding: each rank keeps a slice of every parameter and gathers one decoder layer at a time.

Slices are float32 for the optimizer; gathered layers have the dtype of forward and backward. A single rank runs the
same code with complete parameters.

    mesh [shard]             all ranks share one copy of the model
    mesh [replicate, shard]  each group of consecutive ranks shares one copy (HSDP)

With expert parallelism, groups of consecutive ranks split the experts [E, ...] on dimension 0, and FSDP shards a rank's
experts over the other ranks on dimension 1: mesh [expert_shard, expert], or [replicate, expert_shard, expert].
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from alphaapollo.models.cpu_linear import use_onednn
from alphaapollo.models.cpu_norm import use_short_norms
from alphaapollo.models.expert_parallel import distribute_experts, find_experts, prefetch_layers
from alphaapollo.models.file_tensors import load_for_ranks, read_slice, share_file_tensors
from alphaapollo.models.store import make_store
from alphaapollo.processes.network import find_interface

MIN_UNIT = 2**19  # parameters; gathering a smaller layer on its own costs more time than it saves memory
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # long enough for one rank to load or write a large model


class FsdpRoot(nn.Module):
    """Base class of models that `shard_model` splits over the ranks."""

    layers: Sequence[nn.Module]  # modules that are gathered one at a time, the decoder layers
    float32_modules: Sequence[nn.Module] = ()  # submodules that always compute in float32
    forward_methods: Sequence[str] = ()  # methods besides forward that use parameters

    @property
    def untied_head(self) -> nn.Module | None:
        """A large output head that has its own parameters and a method `compute` that uses them; None: no such head."""
        return None


R = TypeVar("R", bound=FsdpRoot)


def join_process_group(device: str, rank: int, world_size: int, init_method: str) -> None:
    """Initialize torch.distributed for this process, unless another model in the process has done so already.
    init_method: tcp://host:port, with a port that rank 0 has reserved (`network.reserve_port`), or file://path; not
    used by a single rank."""
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
        rendezvous = {"store": make_store(url.hostname, url.port, rank, world_size, COLLECTIVE_TIMEOUT)}
    dist.init_process_group(
        BACKENDS[device], rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT, **rendezvous
    )


@dataclass(frozen=True)
class ModelMesh:
    """Device meshes over which a model is sharded."""

    dense: DeviceMesh  # [shard] or [replicate, shard]: of all parameters except distributed experts
    experts: DeviceMesh | None = None  # [expert_shard, expert] or [replicate, expert_shard, expert]; None: as dense

    def is_first_replica(self) -> bool:
        """Return whether this rank belongs to the first replica of the model. Only HSDP has several replicas."""
        return self.dense.ndim == 1 or self.dense.get_local_rank("replicate") == 0


def make_mesh(device: str, fsdp_size: int = -1, ep_size: int = 1) -> ModelMesh:
    """Create the device meshes of a model (a collective). fsdp_size: number of ranks that share one copy of the model;
    -1: all. ep_size: number of ranks that split the experts of a layer."""
    world_size = dist.get_world_size()
    shards = world_size if fsdp_size == -1 else fsdp_size

    def make(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
        if shards == world_size:
            return init_device_mesh(device, sizes, mesh_dim_names=names)
        return init_device_mesh(device, (world_size // shards, *sizes), mesh_dim_names=("replicate", *names))

    experts = make(("expert_shard", "expert"), (shards // ep_size, ep_size)) if ep_size > 1 else None
    return ModelMesh(make(("shard",), (shards,)), experts)


def shard_model(
    root: R, load_weights: Callable[[], nn.Module], mesh: ModelMesh, dtype: torch.dtype, offload_policy: bool
) -> R:
    """Shard `root` in place, fill the slices of all ranks from rank 0's model, and return `root` (a collective).

    Args:
        root: model on the meta device, with the dtypes of its slices.
        load_weights: loads the same model with weights, on the CPU, in any dtypes. Only rank 0 calls it. Each rank
            reads its slices of marked parameters itself (models/file_tensors.py).
        dtype: dtype of forward and backward. Gradients are reduced in float32, or in float64 if `dtype` is float64.
        offload_policy: use FSDP2's CPU offload: slices, gradients and optimizer state stay in host memory (GPU only).
    """
    device = torch.device(mesh.dense.device_type)
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    policy = CPUOffloadPolicy() if offload_policy and device.type == "cuda" else OffloadPolicy()
    if device.type == "cpu":
        use_onednn(root)
        use_short_norms(root)
    if mesh.experts is not None:
        fsdp_mesh = mesh.experts[mesh.experts.mesh_dim_names[:-1]]  # type: ignore[index]
        expert_precision = replace(precision, cast_forward_inputs=False)  # keep the dtype of the routers' weights
        for experts in find_experts(root):
            distribute_experts(experts, mesh.experts["expert"])
            fully_shard(
                experts,
                mesh=fsdp_mesh,
                mp_policy=expert_precision,
                offload_policy=policy,
                shard_placement_fn=lambda _: Shard(1),
            )
    for layer in root.layers:
        if sum(parameter.numel() for parameter in layer.parameters()) >= MIN_UNIT:
            fully_shard(layer, mesh=mesh.dense, mp_policy=precision, offload_policy=policy)
    if mesh.experts is not None:
        prefetch_layers(root.layers)
    for module in root.float32_modules:
        float32_precision = MixedPrecisionPolicy(param_dtype=reduce_dtype, reduce_dtype=reduce_dtype)
        fully_shard(module, mesh=mesh.dense, mp_policy=float32_precision, offload_policy=policy)
    # The root unit has the embedding and a tied head. The head stays gathered, because backward starts there. An
    # untied head is a unit of its own, so that its gradients are reduced while the layers compute theirs.
    for module in filter(None, [root.untied_head, root]):
        fully_shard(module, mesh=mesh.dense, mp_policy=precision, offload_policy=policy, reshard_after_forward=False)
    if root.untied_head is not None:
        register_fsdp_forward_method(root.untied_head, "compute")
    for method in root.forward_methods:
        register_fsdp_forward_method(root, method)
    with load_for_ranks():
        source = load_weights() if dist.get_rank() == 0 else None
    dist.barrier()  # over gloo with its long timeout: NCCL's would expire while rank 0 still reads the weights
    _fill_slices(root, source, device, torch.device("cpu") if isinstance(policy, CPUOffloadPolicy) else device)
    return root


@torch.no_grad()
def _fill_slices(model: nn.Module, source: nn.Module | None, device: torch.device, slice_device: torch.device) -> None:
    """Fill the slices of all ranks (a collective): with what a rank reads from files, or what rank 0 sends, as it does
    with copies of its buffers. `source`: the model with weights; None on other ranks. Parameters are moved one at a
    time, and converted on the device."""
    model.to_empty(device=slice_device)
    weights = dict(source.named_parameters()) if source else {}
    if source and (unused := sorted(weights.keys() - dict(model.named_parameters()).keys())):
        raise ValueError(f"the model of config.json has no place for the weights of {', '.join(unused[:3])}")
    file_tensors, have_all_ranks_files = share_file_tensors(source)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if have_all_ranks_files and name in file_tensors:
            read_slice(parameter, file_tensors[name])
        else:
            if source:
                full = file_tensors[name].read() if name in file_tensors else weights[name].data
                full = full.to(device).to(parameter.dtype)
            else:
                full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            slices = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=0)
            parameter.to_local().copy_(slices.to_local())
        if source:
            weights[name].data = torch.empty(0)  # frees the memory
    buffers = [dict(source.named_buffers()) if source else None]  # small, with the dtypes of the source
    dist.broadcast_object_list(buffers, 0)
    for name, buffer in cast(dict[str, Tensor], buffers[0]).items():
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._buffers[key] = buffer.to(device)


def reshard(model: nn.Module) -> None:
    """Free the full parameters that a forward pass without backward leaves gathered. Call it before optimizer steps."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded parameter from all ranks onto the GPU, or onto the CPU without GPUs (a collective)."""
    if not isinstance(tensor, DTensor):
        return tensor
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's slice of a sharded parameter, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TensorOffloader:
    """Moves the tensors that `list_tensors` returns to host memory and back, if enabled. Host buffers are reused.

    An offloaded tensor loses its storage but remains the same object, so views of FSDP and references of the optimizer
    remain valid. A computation with an offloaded tensor crashes the process, so reload tensors before it.
    """

    def __init__(self, list_tensors: Callable[[], Iterable[Tensor]], enabled: bool):
        self.enabled = enabled
        self._list_tensors = list_tensors
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}  # storages on the device, and host buffers

    def reload(self) -> None:
        """Move offloaded tensors back to the device, asynchronously. A second call does nothing."""
        for storage, host in self._copies.values():
            if storage.nbytes() < host.numel():
                storage.resize_(host.numel())
                _view_bytes(storage).copy_(host, non_blocking=True)

    def offload(self) -> None:
        """Move all tensors to host memory. A second call does nothing."""
        if not self.enabled:
            return
        listed = (local_tensor(tensor.detach()).untyped_storage() for tensor in self._list_tensors())
        storages = {storage._cdata: storage for storage in listed}
        copies = {k: self._copies.get(k) or (storage, make_host_buffer(storage)) for k, storage in storages.items()}
        for storage, host in copies.values():
            if storage.nbytes():
                host.copy_(_view_bytes(storage), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies must be complete before the memory is freed
        for storage in storages.values():
            storage.resize_(0)
        self._copies = copies


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def make_host_buffer(storage: torch.UntypedStorage) -> Tensor:
    """Make a buffer for a storage in host memory, page-locked until it is deleted if the device is a GPU. torch's own
    pinned allocator rounds sizes up to a power of two, so a model would take a third more memory."""
    host = torch.empty(storage.nbytes(), dtype=torch.uint8)
    if storage.device.type == "cuda" and host.numel():
        cuda, address = torch.cuda.cudart(), host.data_ptr()
        torch.cuda.check_error(cuda.cudaHostRegister(address, host.nbytes, 0))
        weakref.finalize(host, cuda.cudaHostUnregister, address).atexit = False
    return host
