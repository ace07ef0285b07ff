"""A sharded model in training: the optimizer's step, where the schedule stands, and what of both is saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from alphaapollo.config.schema import Fsdp, Optimizer
from alphaapollo.models.checkpoint.snapshot import Snapshot, load_snapshot, take_snapshot
from alphaapollo.models.sharding import local_tensor, reshard
from alphaapollo.models.training.offload import Offload, parameter_offload
from alphaapollo.models.training.optimizer import (
    apply_settings,
    clip_gradients,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)

T = TypeVar("T")
MAX_SKIPPED_STEPS = 20  # steps in a row; then the weights themselves are ruined, and no batch will do


@dataclass(frozen=True)
class Trained:
    """What messages say of a model."""

    name: str  # e.g. "policy"
    optim: str  # the section of its optimizer's keys
    dtype: str = ""  # the key of its arithmetic, where that could be more exact
    look: str = (
        "huge rewards, advantages or log-ratios in the metrics and rollouts/ of this iteration; "
        "trainer.record_steps=[its number], added to the command, keeps all that it gets, to be replayed"
    )


@dataclass(frozen=True)
class OptimizerStep:
    """Of one optimizer step; the same on all ranks."""

    grad_norm: float  # before clipping
    lr: float
    skipped: bool = False  # the gradients were not finite: the weights stayed as they were


class TrainState:
    """Gradients in, one optimizer step out.

    Between `rest` and `reload` the parameters, and until the next step the optimizer's state, may be in host memory.

    Args:
        module: sharded; see sharding.shard.
        grad_clip: largest gradient norm.
        optimizer_steps: optimizer steps of the whole run, for the schedule.
        fsdp: where the optimizer's state rests between phases, and in one until its first step; when gradients are
            reduced.
        who: in messages.
        param_offload: keep the parameters in host memory between phases (GPU only).
    """

    def __init__(
        self,
        module: nn.Module,
        config: Optimizer,
        grad_clip: float,
        optimizer_steps: int,
        fsdp: Fsdp,
        who: Trained,
        param_offload: bool = False,
    ):
        self.module = module
        self.optimizer = make_optimizer(module, config)
        self.config = config
        self.grad_clip = grad_clip
        self.optimizer_steps = optimizer_steps
        self.parameters = parameter_offload(module, param_offload)
        self.moments = Offload(self._moments, fsdp.optimizer_offload and next(module.parameters()).is_cuda)
        self.syncs_each_micro_batch = fsdp.sync_each_micro_batch
        self.who = who
        self.num_steps = 0  # made so far
        self._skipped = 0  # in a row

    def accumulate(self, micro_batches: Sequence[T]) -> Iterator[T]:
        """The micro-batches of one optimizer step, each to be followed by its backward pass. Copies of the model add
        up their gradients in the last one only, and so do slices unless they do in each."""
        module = cast(FSDPModule, self.module)
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            module.set_requires_gradient_sync(is_last or self.syncs_each_micro_batch)
            module.set_requires_all_reduce(is_last)
            yield micro_batch

    def step(self, skip_bad: bool = False) -> OptimizerStep:
        """Clip the accumulated gradients, step, and clear them (a collective of all ranks). A step that is skipped
        does not count for the schedule.

        Raises FloatingPointError if the gradients are not finite, and such a step is not to be skipped; or if many
        were in a row. The weights stay as they were.
        """
        norm = clip_gradients(self.module.parameters(), self.grad_clip)
        lr = learning_rate(self.num_steps, self.config, self.optimizer_steps)
        if not math.isfinite(norm):
            self._skipped += 1
            if not skip_bad or self._skipped == MAX_SKIPPED_STEPS:
                raise FloatingPointError(self._bad_step(norm, skip_bad))
            self.optimizer.zero_grad(set_to_none=True)
            return OptimizerStep(norm, lr, skipped=True)
        self._skipped = 0
        set_learning_rate(self.optimizer, lr)
        self.moments.reload()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return OptimizerStep(norm, lr)

    def _bad_step(self, norm: float, skip_bad: bool) -> str:
        times = f", as at the {self._skipped - 1} before it" if self._skipped > 1 else ""
        ways = [f"data.seed={1000 + self.num_steps} (other batches from there on)"]
        ways += [] if skip_bad else ["trainer.on_bad_step=skip"]
        ways += [f"{self.who.dtype}=float32"] if self.who.dtype else []
        ways += [
            f"{self.who.optim}.lr={self.config.lr / 10:g} with an earlier checkpoint, where it grew over iterations"
        ]
        return (
            f"the {self.who.name}'s gradient norm is {norm} at optimizer step {self.num_steps + 1}{times}; the weights "
            f"stay as they were. Look for {self.who.look}. The same command would resume from the last checkpoint and "
            f"meet the same batch again. Add to it one of: {'; '.join(ways)}."
        )

    def check_finite(self) -> None:
        """Raises FloatingPointError, on all ranks, where a trained weight is not finite (a collective)."""
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        bad = torch.stack([~local_tensor(p.detach()).sum().isfinite() for p in trained.values()]).int()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if names := [name for name, is_bad in zip(trained, bad.tolist(), strict=True) if is_bad]:
            raise FloatingPointError(
                f"{len(names)} of the {self.who.name}'s {len(trained)} parameters are not finite after optimizer step "
                f"{self.num_steps} ({names[0]}): nothing of them is saved. The same command goes on from the last "
                f"checkpoint; add {self.who.optim}.lr={self.config.lr / 10:g} to it."
            )

    def reset_optimizer(self) -> None:
        """Forget the moments: the state of an optimizer that has made no step."""
        self.moments.reload()
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def reload(self) -> None:
        """The parameters are wanted. A second call does nothing."""
        self.parameters.reload()

    def offload(self) -> None:
        """The end of a phase: nothing stays gathered, and what is offloaded goes to host memory."""
        reshard(self.module)
        self.parameters.offload()
        self.moments.offload()

    def snapshot(self, folder: str) -> Snapshot:
        """What a checkpoint in `folder` is to hold (a collective of all ranks). FloatingPointError: ruined weights."""
        self._fetch_all()
        self.check_finite()
        return take_snapshot(folder, self.module, self.optimizer, {"num_steps": self.num_steps})

    def load(self, folder: str) -> None:
        """Moments and steps made are the checkpoint's, settings the configuration's."""
        self._fetch_all()
        self.num_steps = load_snapshot(folder, self.module, self.optimizer)["num_steps"]
        apply_settings(self.optimizer, self.config)

    def trained(self) -> dict[str, list[Tensor]]:
        """This rank's slices of the weights that are trained, and of each of their moments."""
        self._fetch_all()
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        slices = {"weights": [local_tensor(parameter.detach()) for parameter in parameters]}
        for name in ("exp_avg", "exp_avg_sq"):
            slices[name] = [local_tensor(state[name]) for state in self.optimizer.state.values()]
        return slices

    def _fetch_all(self) -> None:
        self.parameters.reload()
        self.moments.reload()

    def _moments(self) -> Iterator[Tensor]:
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if value.ndim > 0)
