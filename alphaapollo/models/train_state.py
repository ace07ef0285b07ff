"""A sharded model in training: its optimiser, where its schedule stands, and how both are saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from alphaapollo.config.schema import Optimizer
from alphaapollo.models import checkpoint
from alphaapollo.models.optimizer import (
    apply_settings,
    clip_gradients,
    learning_rate,
    make_optimizer,
    optimizer_to,
    set_learning_rate,
)


@dataclass(frozen=True)
class StepFigures:
    """Of one optimiser step; the same on all ranks."""

    grad_norm: float  # before clipping
    lr: float


class TrainState:
    """Gradients in, one optimiser step out.

    Args:
        module: sharded; see sharding.shard.
        grad_clip: largest gradient norm.
        optimiser_steps: optimiser steps of the whole run, for the schedule.
        offload_optimizer: keep the optimiser's state in host memory between steps (GPU only).
        name: in messages, e.g. "policy".
    """

    def __init__(
        self,
        module: nn.Module,
        config: Optimizer,
        grad_clip: float,
        optimiser_steps: int,
        offload_optimizer: bool,
        name: str,
    ):
        self.module = module
        self.optimizer = make_optimizer(module, config)
        self.config = config
        self.grad_clip = grad_clip
        self.optimiser_steps = optimiser_steps
        self.device = next(module.parameters()).device.type
        self.offloads = offload_optimizer and self.device == "cuda"
        self.name = name
        self.num_steps = 0  # made so far

    def step(self) -> StepFigures:
        """Clip the accumulated gradients, step, and clear them (a collective of all ranks).

        Raises FloatingPointError if the gradients are not finite: the weights stay as they were, and the run must stop,
        for the next batch would be sampled from a policy that skipped its lesson.
        """
        norm = clip_gradients(self.module.parameters(), self.grad_clip)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the {self.name}'s gradient norm is {norm} at optimiser step {self.num_steps + 1}; the weights stay "
                "as they were. Look for huge rewards, advantages or log-ratios in the metrics before it. The same "
                "command would resume from the last checkpoint and meet the same batch again: give it another "
                "data.seed (other batches from there on), a lower learning rate, or float32 arithmetic "
                "(model.dtype=float32)."
            )
        lr = learning_rate(self.num_steps, self.config, self.optimiser_steps)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return StepFigures(norm, lr)

    def reset_optimizer(self) -> None:
        """Forget the moments: the state of an optimiser that has made no step."""
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def fetch_optimizer(self) -> None:
        """Bring the optimiser's state to the device, before an update."""
        if self.offloads:
            optimizer_to(self.optimizer, self.device)

    def rest_optimizer(self) -> None:
        """Put the optimiser's state into host memory, after an update."""
        if self.offloads:
            optimizer_to(self.optimizer, "cpu")
            torch.cuda.empty_cache()

    def save(self, folder: str) -> None:
        checkpoint.save(folder, self.module, self.optimizer, {"num_steps": self.num_steps})

    def load(self, folder: str) -> None:
        """Moments and steps made are the checkpoint's, settings the configuration's."""
        self.num_steps = checkpoint.load(folder, self.module, self.optimizer)["num_steps"]
        apply_settings(self.optimizer, self.config)
        self.rest_optimizer()
