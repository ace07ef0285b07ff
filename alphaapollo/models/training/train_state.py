"""Training state of a sharded model: optimizers, number of steps, their checkpoints, and offloading to host memory.

An offloaded tensor loses its storage but remains the same object, so FSDP's views of a parameter and the optimizer's
references remain valid. Computing with an offloaded tensor crashes the process, so its owner must reload it first.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from alphaapollo.config.schema import Actor, Critic, RoleFsdp, TuningConfig
from alphaapollo.models.checkpoint import CheckpointSnapshot, load_snapshot, take_snapshot
from alphaapollo.models.lora import is_adapter_parameter
from alphaapollo.models.sharding import local_tensor, reshard
from alphaapollo.models.training.optimizer import (
    clip_gradients,
    compute_learning_rate,
    list_plain_tensors,
    make_optimizers,
    set_hyperparams,
    set_learning_rate,
)

T = TypeVar("T")
MAX_SKIPPED_STEPS = 20  # in a row; after that, the weights are probably damaged


class TensorOffloader:
    """Moves the tensors that `list_tensors` returns to host memory and back, if enabled. Host buffers are reused."""

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
        found = (local_tensor(tensor.detach()).untyped_storage() for tensor in self._list_tensors())
        storages = {storage._cdata: storage for storage in found}
        copies = {key: self._copies.get(key) or (one, make_host_buffer(one)) for key, one in storages.items()}
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
    pinned allocator would round it up to a power of two, so a model would take a third more memory."""
    host = torch.empty(storage.nbytes(), dtype=torch.uint8)
    if storage.device.type == "cuda" and host.numel():
        cuda, address = torch.cuda.cudart(), host.data_ptr()
        torch.cuda.check_error(cuda.cudaHostRegister(address, host.nbytes, 0))
        weakref.finalize(host, cuda.cudaHostUnregister, address).atexit = False
    return host


def make_parameter_offloader(model: nn.Module | None, enabled: bool) -> TensorOffloader:
    """Create the offloader of a model's parameters. LoRA adapters stay on the device, for weight syncs. It is
    disabled if the parameters are not on a GPU."""
    named = model.named_parameters() if model else ()
    parameters = [parameter for name, parameter in named if not is_adapter_parameter(name)]
    return TensorOffloader(lambda: parameters, enabled and any(parameter.is_cuda for parameter in parameters))


@dataclass(frozen=True)
class OptimizerStep:
    """Result of one optimizer step, the same on all ranks."""

    grad_norm: float  # gradient norm before clipping
    lr: float
    skipped: bool = False  # the gradients were not finite, and the weights did not change


class TrainState:
    """Optimizers, learning rate schedule over `total_steps` and checkpoints of a sharded model. `offload` moves
    configured tensors to host memory. `reload` moves parameters back, `step` reloads optimizer state. name, optim_key:
    name of the model and config key of the optimizer in error messages."""

    def __init__(
        self, module: nn.Module, config: Actor | Critic | TuningConfig, total_steps: int, name: str, optim_key: str
    ):
        self.module, self.config, self.total_steps = module, config, total_steps
        self.name, self.optim_key = name, optim_key
        fsdp = config.fsdp_config
        self.optimizers = make_optimizers(module, config.optim)
        self.parameters = make_parameter_offloader(module, isinstance(fsdp, RoleFsdp) and fsdp.param_offload)
        on_gpu = next(module.parameters()).is_cuda
        self.moments = TensorOffloader(
            lambda: [moment for _, moment in self._iterate_moments()], fsdp.optimizer_offload and on_gpu
        )
        self.syncs_each_micro_batch = fsdp.sync_each_micro_batch
        self.num_steps = 0  # steps made so far
        self.num_skipped = 0  # steps skipped in a row

    def iterate_micro_batches(self, micro_batches: Sequence[T]) -> Iterator[T]:
        """Yield the micro-batches of one optimizer step. The caller runs the backward pass of each. FSDP reduces
        gradients after each or, with sync_each_micro_batch=false, after the last one, and between copies of the model
        (HSDP) after the last one."""
        module = cast(FSDPModule, self.module)
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            module.set_requires_gradient_sync(is_last or self.syncs_each_micro_batch)
            module.set_requires_all_reduce(is_last)
            yield micro_batch

    def step(self, skip_bad_step: bool = False) -> OptimizerStep:
        """Clip the accumulated gradients, run an optimizer step and clear the gradients (a collective). With
        `skip_bad_step`, a step with non-finite gradients is skipped and does not count in the schedule. Otherwise, or
        after too many skipped steps in a row, it raises FloatingPointError, and the weights remain unchanged."""
        norm = clip_gradients(self.module.parameters(), self.config.grad_clip)
        lr = compute_learning_rate(self.num_steps, self.config.optim, self.total_steps)
        if not math.isfinite(norm):
            self.num_skipped += 1
            if not skip_bad_step or self.num_skipped == MAX_SKIPPED_STEPS:
                repeated = f", {self.num_skipped} times in a row" if skip_bad_step else ""
                skip = "" if skip_bad_step else " trainer.on_bad_step=skip,"
                raise FloatingPointError(
                    f"the {self.name}'s gradient norm is {norm} at optimizer step {self.num_steps + 1}{repeated}; "
                    "the weights are unchanged. Check the data for damaged examples and huge rewards, or add one of "
                    f"these settings to the command: data.seed={1000 + self.num_steps} (other batches),{skip} or "
                    f"{self.optim_key}.lr={self.config.optim.lr / 10:g} (smaller steps)."
                )
            self.module.zero_grad(set_to_none=True)
            return OptimizerStep(norm, lr, skipped=True)
        self.num_skipped = 0
        set_learning_rate(self.optimizers, lr)
        self.moments.reload()
        for optimizer in self.optimizers:
            optimizer.step()
        self.module.zero_grad(set_to_none=True)
        self.num_steps += 1
        return OptimizerStep(norm, lr)

    def check_weights_finite(self) -> None:
        """Raise FloatingPointError on all ranks if a trained weight is not finite (a collective)."""
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        bad = torch.stack([~local_tensor(p.detach()).sum().isfinite() for p in trained.values()]).int()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if names := [name for name, is_bad in zip(trained, bad.tolist(), strict=True) if is_bad]:
            raise FloatingPointError(
                f"{len(names)} of the {self.name}'s {len(trained)} parameters are not finite after optimizer "
                f"step {self.num_steps}, e.g. {names[0]}, so no checkpoint is saved. To resume from the last one, run "
                f"the command again with {self.optim_key}.lr={self.config.optim.lr / 10:g}."
            )

    def reset_optimizer(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def reload(self) -> None:
        """Move offloaded parameters back to the device. A second call does nothing."""
        self.parameters.reload()

    def offload(self) -> None:
        """Free gathered parameters, and move the configured tensors to host memory."""
        reshard(self.module)
        self.parameters.offload()
        self.moments.offload()

    def snapshot(self, folder: str) -> CheckpointSnapshot:
        """Take a snapshot for a checkpoint in `folder` (a collective). Raises like check_weights_finite."""
        self._reload_all_tensors()
        self.check_weights_finite()
        counts = {"num_steps": self.num_steps, "num_skipped": self.num_skipped}
        return take_snapshot(folder, self.module, self.optimizers, counts)

    def load(self, folder: str) -> None:
        """Load weights, optimizer state and counts of a checkpoint. Weight decay and betas remain as configured."""
        self._reload_all_tensors()
        counts = load_snapshot(folder, self.module, self.optimizers)
        self.num_steps, self.num_skipped = counts["num_steps"], counts.get("num_skipped", 0)
        set_hyperparams(self.module, self.optimizers, self.config.optim)

    def get_trained_tensors(self) -> dict[str, list[Tensor]]:
        """Return this rank's slices of the trained "weights" and of the optimizer states, e.g. Adam's "exp_avg"."""
        self._reload_all_tensors()
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        slices = {"weights": [local_tensor(parameter.detach()) for parameter in parameters]}
        for name, moment in self._iterate_moments():
            slices.setdefault(name, []).append(moment)
        return slices

    def _reload_all_tensors(self) -> None:
        self.parameters.reload()
        self.moments.reload()

    def _iterate_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each optimizer state with more than one value, and this rank's slice."""
        for state in (state for optimizer in self.optimizers for state in optimizer.state.values()):
            for name, value in state.items():
                yield from ((name, tensor) for tensor in list_plain_tensors(value) if tensor.ndim > 0)
