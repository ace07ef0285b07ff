"""Parameters that each rank reads from safetensors files itself: only the bytes of its own shard.

Rank 0 builds a model from mapped files, of which no page is read yet, and marks the parameters that are tensors of
these files, or experts that transformers stacks. It sends slices of all other parameters: those that transformers
converts in another way, because this may mix rows, and those that no file has under their name.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from alphaapollo.models.moe_routing import ExpertSizes
from alphaapollo.models.weight_files import find_weight_files, map_tensors, read_tensor
from alphaapollo.runs.input_digests import digest_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MARK = "file_tensor"  # attribute of a parameter
_is_for_ranks: ContextVar[bool] = ContextVar("is_for_ranks", default=False)


@dataclass(frozen=True)
class FileTensor:
    """Values of a parameter [n, ...] in safetensors files."""

    name: str
    dtype: torch.dtype
    sources: Mapping[str, Sequence[tuple[Path, str]]]  # pattern of the converter -> (file, name) of each tensor
    converter: Any = None  # of transformers, which stacks n tensors of each pattern; None: one tensor

    def read(self, ranges: Sequence[slice] = (slice(None),)) -> Tensor:
        """Read a range of each of the first dimensions. The result may be a view of the mapped file."""
        if self.converter is None:
            ((part,),) = self.sources.values()
            return read_tensor(*part, ranges).to(self.dtype)
        converter = copy.deepcopy(self.converter)
        for pattern, parts in self.sources.items():
            converter.collected_tensors[pattern] = [read_tensor(*part).to(self.dtype) for part in parts[ranges[0]]]
        (merged,) = converter.convert(self.name).values()
        return merged[(slice(None), *ranges[1:])]


def find_file_tensors(model: PreTrainedModel, path: str) -> dict[str, FileTensor]:
    """Find the parameters of a model that are tensors of its safetensors files, under any name, or merged from one
    tensor per row (experts). Empty for other files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    file_of = map_tensors(find_weight_files(path))
    transforms = get_model_conversion_mapping(model) if file_of else []
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    prefix, known = model.base_model_prefix, model.state_dict()
    sources: dict[str, dict[str, list[tuple[Path, str]]]] = {}
    for name in sorted(file_of, key=dot_natural_key):  # the order in which transformers stacks
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        sources.setdefault(target, {}).setdefault(pattern or "", []).append((file_of[name], name))
    found = {}
    for name, parameter in model.named_parameters():
        parts = sources.get(name, {})
        if [*map(len, parts.values())] == [1] and "" in parts:
            found[name] = FileTensor(name, parameter.dtype, parts)
        converter = next((one for one in converters if {*one.source_patterns} == {*parts}), None)
        if converter and _stacks_rows(converter) and {len(part) for part in parts.values()} == {len(parameter)}:
            found[name] = FileTensor(name, parameter.dtype, parts, converter)
    return found


def _stacks_rows(converter: Any) -> bool:
    """Return whether a converter stacks tensors on dimension 0 and then leaves this dimension as it is."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = converter.operations
    joins = all(type(other) is Concatenate and other.dim > 0 for other in others)
    return joins and type(first) is MergeModulelist and first.dim == 0


def mark_file_tensors(model: PreTrainedModel, path: str, new_weights: Collection[str] = ()) -> None:
    """Mark the parameters of a loaded model that ranks may read from its files, except `new_weights`, in the context of
    `load_for_ranks`. The values of marked parameters must not be changed afterwards."""
    for name, tensor in find_file_tensors(model, path).items() if _is_for_ranks.get() else ():
        parameter, row = model.get_parameter(name), [slice(0, 1)]
        is_loaded = tensor.converter or tensor.read(row).equal(parameter.data[:1])  # transformers took it, too
        if is_loaded and name not in new_weights:
            vars(parameter)[MARK] = tensor


def share_file_tensors(source: nn.Module | None) -> tuple[dict[str, FileTensor], bool]:
    """Send the marks of rank 0's model to all ranks (a collective). source: None on other ranks. Returns them by
    parameter, and whether all nodes have the same files."""
    named = source.named_parameters() if source else ()
    shared = [{name: vars(parameter)[MARK] for name, parameter in named if MARK in vars(parameter)}]
    dist.broadcast_object_list(shared, 0)
    parts = {part for tensor in shared[0].values() for parts in tensor.sources.values() for part in parts}
    return shared[0], bool(parts) and _have_all_nodes(sorted({file for file, _ in parts}))


def _have_all_nodes(files: Sequence[Path]) -> bool:
    """Return whether all nodes have the same files (a collective). The ranks of a node share the reading."""
    hosts, rank = _gather(socket.gethostname()), dist.get_rank()
    ranks = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    own = files[ranks.index(rank) :: len(ranks)]
    digests = _gather({file: digest_file(file) for file in own if file.is_file()})
    found = [[digest[file] for digest in digests if file in digest] for file in files]
    return all(len(one) == len({*hosts}) and len({*one}) == 1 for one in found)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def read_slice(parameter: DTensor, tensor: FileTensor) -> None:
    """Read this rank's slice of a parameter from files, in place."""
    slices, placements = parameter.to_local(), parameter.placements
    if slices.numel():
        sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
        ranges = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        slices.copy_(tensor.read(ranges).to(slices.device))


def leaves_experts(config: PretrainedConfig) -> bool:
    """Return whether a model is loaded in the context of `load_for_ranks`, and has experts."""
    return _is_for_ranks.get() and ExpertSizes.from_config(config) is not None


@contextmanager
def load_for_ranks() -> Iterator[None]:
    """Context manager in which models are loaded with marks, and without the experts that ranks can merge themselves:
    the values of marked parameters are only in files."""
    token = _is_for_ranks.set(True)
    try:
        yield
    finally:
        _is_for_ranks.reset(token)


def read_state_dict_without_experts(model: PreTrainedModel, path: str) -> dict[str, Tensor]:
    """Read the weights of a model on the meta device, with views of one number, which take no memory, instead of the
    experts that transformers would merge. Empty: the files have no such experts."""
    merged = {name: tensor for name, tensor in find_file_tensors(model, path).items() if tensor.converter}
    left = {name for tensor in merged.values() for parts in tensor.sources.values() for _, name in parts}
    if not merged:
        return {}
    files = map_tensors(find_weight_files(path))
    tensors = {name: read_tensor(file, name) for name, file in files.items() if name not in left}
    for name, tensor in merged.items():
        tensors[name] = torch.full((1,), torch.nan, dtype=tensor.dtype).expand(model.get_parameter(name).shape)
    return tensors
