"""Expert parallelism: consecutive ranks split the experts of a layer, and exchange tokens in an all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Find the modules with the experts of a layer, whose parameters [E, ...] have one slice per expert. Only classes
    with transformers' decorator `use_experts_implementation` are found."""
    return [module for module in model.modules() if hasattr(module, "num_experts") and hasattr(module, "is_transposed")]


def distribute_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Split the parameters of an experts module (`find_experts`) over a one-dimensional mesh in place, and replace its
    forward method by one that exchanges tokens. The parameters must be on the meta device, and become DTensors."""
    num_experts: Any = experts.num_experts
    compute = partial(_compute_local_experts, experts, type(experts), num_experts // mesh.size())
    for name, parameter in list(experts.named_parameters()):
        local = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(local, requires_grad=parameter.requires_grad))
    experts.forward = partial(_exchange_and_compute, compute, num_experts, mesh.get_group())


def prefetch_layers(layers: Sequence[nn.Module]) -> None:
    """Gather each layer while the one before it is computed. Otherwise a layer with experts would be gathered only
    after the host has read the number of tokens to exchange."""
    units = [list[FSDPModule](part for part in layer.modules() if isinstance(part, FSDPModule)) for layer in layers]
    for before, after in pairwise(filter(None, units)):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)


ReadSizes = Callable[[Tensor], list[list[int]]]  # copies numbers of tokens from the device to the host
_read_split_sizes: ContextVar[ReadSizes] = ContextVar("read_split_sizes", default=lambda sizes: sizes.tolist())


def keep_split_sizes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts for a checkpointed layer (`context_fn` of torch.utils.checkpoint). The first keeps the split
    sizes of the forward pass. The second reuses them in the recomputation, which thus does not wait for the GPU."""
    kept_sizes: list[list[list[int]]] = []

    def read_and_keep(sizes: Tensor) -> list[list[int]]:
        kept_sizes.append(sizes.tolist())
        return kept_sizes[-1]

    @contextmanager
    def read_sizes_with(read: ReadSizes) -> Iterator[None]:
        token = _read_split_sizes.set(read)
        try:
            yield
        finally:
            _read_split_sizes.reset(token)

    return read_sizes_with(read_and_keep), read_sizes_with(lambda _: kept_sizes.pop(0))


@torch.compiler.disable
def _exchange_and_compute(
    compute: Any, num_experts: int, group: dist.ProcessGroup, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Compute the sum of the chosen experts' outputs, weighted by `weights`. [n, H], [n, k], [n, k] -> [n, H]"""
    size, (num_tokens, k) = group.size(), chosen.shape
    experts, order = chosen.flatten().sort(stable=True)
    counts = experts.new_zeros(num_experts).scatter_add_(0, experts, torch.ones_like(experts))
    counts = counts.view(size, -1)  # token-expert pairs for each expert of each rank
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    sent_sizes, received_sizes = _read_split_sizes.get()(torch.stack([counts.sum(1), received.sum(1)]))
    pairs = all_to_all_single_autograd(hidden[order // k], received_sizes, sent_sizes, group)
    local_experts = torch.arange(counts.shape[1], device=hidden.device).repeat(size)
    outputs = compute(pairs, local_experts.repeat_interleave(received.flatten(), output_size=len(pairs)))
    returned = all_to_all_single_autograd(outputs, sent_sizes, received_sizes, group)
    expert_outputs = returned[order.argsort()].view(num_tokens, k, -1)
    return (expert_outputs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _compute_local_experts(
    experts: nn.Module, experts_class: type[nn.Module], num_local: int, pairs: Tensor, chosen: Tensor
) -> Tensor:
    """Compute m token-expert pairs with this rank's experts. [m, H], [m] -> [m, H]"""
    num_pairs = len(pairs)
    if num_pairs == 0:  # one row of zeros keeps the backward pass, in which all ranks exchange gradients
        pairs, chosen = F.pad(pairs, (0, 0, 0, 1)), chosen.new_zeros(1)
    local = experts_class.__new__(experts_class)  # the same module with local parameters, and without hooks
    local.__dict__.update(vars(experts), _parameters={}, num_experts=num_local, **dict(_iterate_local(experts)))
    outputs: Tensor = experts_class.forward(local, pairs, chosen[:, None], pairs.new_ones(len(pairs), 1))
    return outputs[:num_pairs]


def _iterate_local(experts: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and local part of each parameter. The gradient of the local part is the sum over the n ranks that
    exchange tokens. A hook divides it by n, because FSDP averages only over the ranks with the same experts."""
    for name, parameter in experts.named_parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        if local.requires_grad:
            local.register_hook(partial(torch.mul, other=1 / parameter.device_mesh.size()))
        yield name, local
