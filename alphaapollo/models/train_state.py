"""Training state of a sharded model: optimizers, learning rate schedule, number of steps, and checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from alphaapollo.config.schema import Actor, Critic, Optimizer, RoleFsdp, TuningConfig
from alphaapollo.models.checkpoint import CheckpointSnapshot, load_snapshot, take_snapshot
from alphaapollo.models.learning_rate import compute_learning_rate, set_learning_rate
from alphaapollo.models.lora import is_adapter_parameter
from alphaapollo.models.sharding import TensorOffloader, full_tensor, local_tensor, reshard
from alphaapollo.models.update_record import UpdateRecord

T = TypeVar("T")
MAX_SKIPPED_STEPS = 20  # in a row; after that, the weights are probably damaged


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


@dataclass(frozen=True)
class AdamSettings:
    """Settings of AdamW for one step. None: as configured."""

    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None


AS_CONFIGURED = AdamSettings()


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
        offloads_parameters = isinstance(fsdp, RoleFsdp) and fsdp.param_offload
        self.parameter_offloader = make_parameter_offloader(module, offloads_parameters)
        offloads_moments = fsdp.optimizer_offload and next(module.parameters()).is_cuda
        self.moment_offloader = TensorOffloader(lambda: [m for _, m in self._iterate_moments()], offloads_moments)
        self.syncs_each_micro_batch = fsdp.sync_each_micro_batch
        self.take_step: Callable[[], float] | None = None  # TRPO's step: moves the weights, returns the step size
        self.adam = AS_CONFIGURED  # settings of the last step
        self.record: UpdateRecord | None = None  # None: the current update is not recorded
        self.num_steps = 0  # steps made so far
        self.num_skipped = 0  # steps skipped in a row

    def iterate_micro_batches(self, micro_batches: Sequence[T]) -> Iterator[T]:
        """Yield the micro-batches of one optimizer step. The caller runs the backward pass of each. FSDP reduces
        gradients after each micro-batch, or after the last with sync_each_micro_batch=false. Between copies of the
        model (HSDP), it always reduces them after the last micro-batch."""
        module = cast(FSDPModule, self.module)
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            module.set_requires_gradient_sync(is_last or self.syncs_each_micro_batch)
            module.set_requires_all_reduce(is_last)
            yield micro_batch

    def step(
        self,
        skip_bad_step: bool = False,
        lr: float | None = None,
        grad_clip: float | None = None,
        adam: AdamSettings = AS_CONFIGURED,
    ) -> OptimizerStep:
        """Clip the accumulated gradients, run an optimizer step and clear the gradients (a collective). With
        `skip_bad_step`, a step with non-finite gradients is skipped and does not count in the schedule. Otherwise, or
        after too many skipped steps in a row, such a step raises FloatingPointError. The weights remain unchanged.

        lr: learning rate; None: that of the schedule. grad_clip: maximum gradient norm; None: the configured one.
        """
        if self.record:
            self.record.write_gradients()
        norm = clip_gradients(self.module.parameters(), self.config.grad_clip if grad_clip is None else grad_clip)
        lr = compute_learning_rate(self.num_steps, self.config.optim, self.total_steps) if lr is None else lr
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
        if adam != self.adam:
            set_hyperparams(self.module, self.optimizers, self.config.optim, adam)
            self.adam = adam
        set_learning_rate(self.optimizers, lr)
        self.moment_offloader.reload()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.take_step is not None:
            lr = self.take_step()
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

    def reset_optimizer(self, resets_schedule: bool = False) -> None:
        """Drop the optimizers' state. resets_schedule: also the number of steps."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        if resets_schedule:
            self.num_steps = self.num_skipped = 0

    def reload(self) -> None:
        """Move offloaded parameters back to the device. A second call does nothing."""
        self.parameter_offloader.reload()

    def offload(self) -> None:
        """Free gathered parameters, and move the configured tensors to host memory."""
        reshard(self.module)
        self.parameter_offloader.offload()
        self.moment_offloader.offload()

    def snapshot(self, folder: str) -> CheckpointSnapshot:
        """Take a snapshot for a checkpoint in `folder` (a collective). Raises the error of check_weights_finite."""
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
        self.adam = AS_CONFIGURED

    def get_trained_tensors(self) -> dict[str, list[Tensor]]:
        """Return this rank's slices of the trained "weights" and of the optimizer states, e.g. Adam's "exp_avg"."""
        self._reload_all_tensors()
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        slices = {"weights": [local_tensor(parameter.detach()) for parameter in parameters]}
        for name, moment in self._iterate_moments():
            slices.setdefault(name, []).append(moment)
        return slices

    def _reload_all_tensors(self) -> None:
        self.parameter_offloader.reload()
        self.moment_offloader.reload()

    def _iterate_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each optimizer state with more than one value, and this rank's slice."""
        for state in (state for optimizer in self.optimizers for state in optimizer.state.values()):
            for name, value in state.items():
                yield from ((name, tensor) for tensor in list_plain_tensors(value) if tensor.ndim > 0)


def make_optimizers(model: nn.Module, config: Optimizer) -> list[torch.optim.Optimizer]:
    """Create the optimizers of the trained parameters: AdamW (arXiv 1711.05101) and, with name=muon, Muon for the
    matrices of the decoder layers; none with name=trpo (workers/trust_region.py). Norms and biases have no weight
    decay."""
    if config.name == "trpo":
        return []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_layers = {parameter for layer in getattr(model, "layers", ()) for parameter in layer.parameters()}
    muon_parameters = find_matrices(model) & in_layers if config.name == "muon" else set[nn.Parameter]()
    matrices = [parameter for parameter in trained if parameter in muon_parameters]
    others = [parameter for parameter in trained if parameter not in muon_parameters]
    decayed = find_decayed(model)
    groups = [[p for p in others if p in decayed], [p for p in others if p not in decayed]]
    adam_groups: list[dict[str, object]] = [{"params": group} for group in groups if group]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(ShardedMuon(matrices, lr=config.lr))
    if adam_groups and config.name == "adamw_8bit":
        optimizers.append(make_adamw_8bit(adam_groups, config.lr, trained[0].is_cuda))
    elif adam_groups:
        optimizers.append(torch.optim.AdamW(adam_groups, lr=config.lr, fused=True))
    set_hyperparams(model, optimizers, config)
    return optimizers


def make_adamw_8bit(groups: list[dict[str, object]], lr: float, on_gpu: bool) -> torch.optim.Optimizer:
    """Create torchao's AdamW with block-wise quantized moments of 8 bits (arXiv 2110.02861). On a CPU its steps are not
    compiled."""
    from torchao.optim import AdamW8bit  # may not be installed
    from torchao.optim.subclass_8bit import OptimState8bit

    @OptimState8bit.implements(torch.ops.aten.new_empty.default)
    def new_empty(func: Any, types: Any, args: Iterable[Any], kwargs: dict[str, object]) -> Tensor:
        """Create a tensor for torch's background checkpoint writer, which then copies codes and scales into it."""
        moments, shape = args
        return OptimState8bit.zeros(shape, moments.signed, moments.block_size, kwargs["device"], moments.dtype)

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=lr)
    if not on_gpu:
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def find_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the candidates for Muon: the weights of linear layers and of routers, which are linear maps."""
    return {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Linear) or re.search("router|gate", type(module).__name__, re.IGNORECASE)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    }


def find_decayed(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters with weight decay: all but norms and biases, which may have several dimensions, e.g. one
    for the experts."""
    return {
        parameter
        for module in model.modules()
        if "norm" not in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim >= 2 and "bias" not in name
    }


def set_hyperparams(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], config: Optimizer, adam: AdamSettings = AS_CONFIGURED
) -> None:
    """Set weight decay, betas and eps from `config` and, where given, from `adam`. Call it again after loading a
    checkpoint, which restores old values."""
    decayed, weight_decay = find_decayed(model), config.weight_decay if adam.weight_decay is None else adam.weight_decay
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = weight_decay if group["params"][0] in decayed else 0.0
            if "betas" in group:
                group["betas"] = adam.betas or config.betas
                group["eps"] = optimizer.defaults["eps"] if adam.eps is None else adam.eps


def list_plain_tensors(state: Tensor) -> list[Tensor]:
    """Return the tensors with the data of an optimizer state on this rank: codes and scales if it is quantized."""
    shard: Any = local_tensor(state)
    return [shard.codes, shard.scale] if hasattr(shard, "codes") else [shard]


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the gradient norm over all ranks to `max_norm` (a collective). Returns the norm before clipping. Non-finite
    gradients are not changed, and their norm, which is not finite, is returned."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    slices = [local_tensor(gradient) for gradient in gradients]
    total = torch.nn.utils.get_total_norm(slices)
    square = total.to(torch.promote_types(total.dtype, torch.float32)).square()
    norm = math.sqrt(sum_over_shards(square, gradients[0]).item())
    if max_norm < norm < math.inf:
        torch._foreach_mul_(slices, max_norm / norm)  # one kernel on a GPU
    return norm


def sum_over_shards(value: Tensor, like: Tensor) -> Tensor:
    """Add up, in place, a number of each slice of a model over the ranks that share one copy of it (a collective).
    like: a parameter or gradient of the model. With HSDP, other copies are not added."""
    mesh = like.device_mesh if isinstance(like, DTensor) else None
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names or () if name != "replicate"] if mesh else [None]
    for group in groups:
        dist.all_reduce(value, group=group)
    return value


class ShardedMuon(torch.optim.Muon):
    """torch's Muon (arXiv 2502.16982, Eq. 2-4), whose result does not depend on the number of ranks.

    Orthogonalization needs complete matrices. The n ranks that share the model process n matrices at a time: each rank
    gathers and orthogonalizes one matrix, and sends the result to the others. Momentum and weights remain sharded.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            first = parameters[0] if parameters else None
            num_ranks = first.device_mesh["shard"].size() if isinstance(first, DTensor) else 1
            for start in range(0, len(parameters), num_ranks):
                chosen = slice(start, start + num_ranks)  # one matrix per rank
                updates = [
                    _update_momentum(gradient, momentum, group["momentum"])
                    for gradient, momentum in zip(gradients[chosen], momenta[chosen], strict=True)
                ]
                for parameter, update in zip(parameters[chosen], _orthogonalize(updates, group), strict=True):
                    shard, scale = local_tensor(parameter), _adjust_lr(group["lr"], "match_rms_adamw", parameter.shape)
                    shard.mul_(1 - group["lr"] * group["weight_decay"])
                    shard.add_(local_tensor(update).to(shard.device), alpha=-scale)


def _update_momentum(gradient: Tensor, momentum: Tensor, decay: float) -> Tensor:
    """Update the momentum in place, and return Nesterov's update in bfloat16, in which it is orthogonalized."""
    momentum.lerp_(gradient, 1 - decay)
    return gradient.lerp(momentum, decay).bfloat16()


def _orthogonalize(updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Orthogonalize up to one matrix per rank, and shard the results like the matrices (a collective)."""
    own, first = None, updates[0]  # own: the matrix that this rank orthogonalizes, if any
    rank = first.device_mesh.get_local_rank("shard") if isinstance(first, DTensor) else 0
    for owner, update in enumerate(updates):
        matrix = full_tensor(update)
        own = matrix if owner == rank else own
    if own is not None:
        own = _zeropower_via_newtonschulz(own, group["ns_coefficients"], group["ns_steps"], group["eps"]).contiguous()
    return [_send_to_shards(own if owner == rank else None, owner, update) for owner, update in enumerate(updates)]


def _send_to_shards(matrix: Tensor | None, owner: int, like: Tensor) -> Tensor:
    """Send a complete matrix from its owner to the ranks that share the model. `matrix`: None on other ranks."""
    if not isinstance(like, DTensor):
        assert matrix is not None
        return matrix
    mesh = like.device_mesh
    if matrix is None:
        matrix = torch.empty(like.shape, dtype=like.dtype, device=mesh.device_type)
    dist.broadcast(matrix, group=mesh.get_group("shard"), group_src=owner)
    return distribute_tensor(matrix, mesh, like.placements, src_data_rank=None)
