"""Several LoRA adapters on one base model, of which one at a time is in the model of a training rank.

A slot has what belongs to one adapter: weights, gradients, optimizer state, number of steps, scale. A switch copies the
weights and exchanges references to the rest. The model's own adapter has the largest rank and all adapted layers. Where
another adapter has a smaller rank or skips a layer, A = B = 0. Both gradients are then 0, and every optimizer keeps
A and B 0, so the result is that of the smaller adapter.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from alphaapollo.engines.weight_sync.digest import format_digest
from alphaapollo.engines.weight_sync.shared_memory import write_adapter_files
from alphaapollo.models.lora import ADAPTER, gather_scaled_adapter, get_lora_layers, is_adapter_parameter
from alphaapollo.models.sharding import local_tensor
from alphaapollo.utils.seeds import derive_seed
from alphaapollo.workers.policy_objective import TrainedRows

if TYPE_CHECKING:
    from alphaapollo.workers.policy import PolicyWorker

OWN = ""
"""Name of the model's own adapter: the adapter with which the model is loaded."""


@dataclass(frozen=True)
class AdapterForm:
    """Rank, scale and layers of an adapter. Rank and layers are at most those of the model's own adapter."""

    rank: int
    alpha: float  # the scale is alpha / rank
    target_modules: tuple[str, ...] = ()  # names of layers, e.g. q_proj; empty: all adapted layers
    seed: int = 0

    def adapts(self, parameter_name: str) -> bool:
        return not self.target_modules or any(f".{layer}.lora_" in parameter_name for layer in self.target_modules)


@dataclass
class AdapterSlot:
    """State of an adapter that is not in the model. Tensors are this rank's slices."""

    form: AdapterForm
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    moments: Sequence[Mapping[Tensor, object]]  # state of each optimizer
    num_steps: int = 0
    num_skipped: int = 0
    accumulated: list[TrainedRows] = field(default_factory=list)


class AdapterSlots:
    """Adapters of a policy worker. All ranks must call its methods together."""

    def __init__(self, worker: PolicyWorker, own: AdapterForm):
        self.worker, self.current, self.form = worker, OWN, own
        self._slots: dict[str, AdapterSlot] = {}  # all adapters but the current one

    @property
    def names(self) -> set[str]:
        return {self.current, *self._slots}

    def list_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the adapter in the model, by name."""
        return {name: p for name, p in self.worker.policy.named_parameters() if is_adapter_parameter(name)}

    def list_layers(self) -> list[str]:
        """Return the paths of the layers with adapters."""
        return [name.removesuffix(".base_layer.weight") for name in get_lora_layers(self.worker.policy.model)]

    def add(self, name: str, form: AdapterForm) -> None:
        """Add an adapter: A is drawn from peft's initial distribution with the form's seed, B is 0. An adapter of the
        same name is replaced. Raises ValueError for an unknown layer."""
        known = sorted({layer.rpartition(".")[2] for layer in self.list_layers()})
        if unknown := sorted(set(form.target_modules) - set(known)):
            raise ValueError(f"target_modules={unknown} are no layers with adapters. Use some of {', '.join(known)}.")
        generator, weights = torch.Generator().manual_seed(derive_seed(form.seed, "lora")), list[Tensor]()
        for key, parameter in self.list_parameters().items():
            full = torch.zeros(parameter.shape, dtype=parameter.dtype)
            if ".lora_A." in key and form.adapts(key):
                nn.init.kaiming_uniform_(full[: form.rank], a=math.sqrt(5), generator=generator)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            weights.append(local_tensor(full).to(parameter.device, copy=True))
        slot = AdapterSlot(form, weights, [None] * len(weights), [{} for _ in self.worker.state.optimizers])
        if name == self.current:
            self._put_into_model(slot)
        else:
            self._slots[name] = slot

    def remove(self, name: str) -> None:
        """Remove an adapter. If it is the current adapter, first put the model's own adapter into the model."""
        if name == self.current:
            self.switch(OWN)
        del self._slots[name]

    def switch(self, name: str) -> None:
        """Put an adapter into the model, and keep the previous adapter in its slot."""
        if name != self.current:
            self._slots[self.current] = self._take_from_model()
            self._put_into_model(self._slots.pop(name))
            self.current = name

    @torch.no_grad()
    def _take_from_model(self) -> AdapterSlot:
        parameters, state = [*self.list_parameters().values()], self.worker.state
        state.moment_offloader.reload()  # an offloader keeps the host buffers of one set of tensors only
        return AdapterSlot(
            self.form,
            [local_tensor(parameter).clone() for parameter in parameters],
            [parameter.grad for parameter in parameters],
            [dict(optimizer.state) for optimizer in state.optimizers],
            state.num_steps,
            state.num_skipped,
            self.worker.accumulated,
        )

    @torch.no_grad()
    def _put_into_model(self, slot: AdapterSlot) -> None:
        worker, self.form, parameters = self.worker, slot.form, self.list_parameters().values()
        for parameter, weights, gradient in zip(parameters, slot.weights, slot.gradients, strict=True):
            local_tensor(parameter).copy_(weights)
            parameter.grad = gradient
        for optimizer, moments in zip(worker.state.optimizers, slot.moments, strict=True):
            optimizer.state.clear()
            optimizer.state.update(moments)
        worker.state.num_steps, worker.state.num_skipped = slot.num_steps, slot.num_skipped
        worker.accumulated = slot.accumulated
        for layer in get_lora_layers(worker.policy).values():
            layer.scaling[ADAPTER] = slot.form.alpha / slot.form.rank

    def write(self, folder: str, dtype: torch.dtype, base_path: str, base_digest: int) -> str:
        """Write the current adapter to a new folder in peft's format (a collective; rank 0 writes). Returns the sum of
        its digest and `base_digest` on rank 0, else ""."""
        tensors = [(key, tensor.to("cpu", dtype)) for key, tensor in self._gather()]  # before rank 0 can fail alone
        if dist.get_rank():
            return ""
        target = Path(folder)
        partial = target.with_name(f".writing_{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        digest = write_adapter_files(tensors, partial, dtype, base_path)
        partial.rename(target)
        return format_digest(digest + base_digest)

    @torch.no_grad()
    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in peft's files, tensor) of each matrix of the current adapter, cut to the adapter's rank (a
        collective). B is multiplied by the scale."""
        rank = self.form.rank
        for name, tensor in gather_scaled_adapter(self.worker.policy.model):
            if self.form.adapts(name):
                yield name, tensor[:rank] if name.endswith("lora_A.weight") else tensor[:, :rank]
