"""Tensors of a model: gradients, optimizer steps, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from alphaapollo.plugins.verify.reference import optimizers
from alphaapollo.plugins.verify.reference.samples import NotCovered
from alphaapollo.runs.update_checks import Check
from alphaapollo.trainer.replay.recording import Recording

SMALL = 1e-3  # a tensor whose norm is a smaller share of the norm of all tensors counts as this share ...
SMALL_IN_BFLOAT16 = 0.1  # ... if it was computed in bfloat16

LIMITS = {  # optimizer -> tolerance of the change of the weights
    "muon": (0.15, "Muon orthogonalizes in bfloat16"),
    "trpo": (0.05, "TRPO's products with the Fisher matrix are finite differences in float32"),
}


def compare_tensors(
    quantity: str,
    recorded: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    limit: float,
    reason: str,
    small: float = SMALL,
) -> Check:
    """Compare tensors by the largest relative difference (of norms). If all of them are 0, nothing is compared."""
    if not any(one.count_nonzero() for one in (*recorded.values(), *reference.values())):
        compared = "gradient" if "gradient" in quantity else "change"
        return Check(quantity, "", 0.0, 0.0, f"every {compared} is 0", covered=False)
    total = sum(float((one**2).sum()) for one in reference.values()) ** 0.5
    worst, largest = "", 0.0
    for name in sorted({*recorded} | {*reference}):
        zeros = torch.zeros_like((reference if name in reference else recorded)[name])
        one, other = (each.get(name, zeros).double() for each in (recorded, reference))
        scale = max(float(other.norm()), small * total) or 1.0
        difference = float((one - other).norm()) / scale if one.shape == other.shape else math.inf
        difference = math.inf if math.isnan(difference) else difference
        if difference > largest:
            worst, largest = name, difference
    where = worst.removeprefix("model.").removeprefix("model.") or "all tensors"
    return Check(quantity, where, largest, limit, reason)


def take_gradients(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return the gradients by recorded name, and clear them."""
    gradients = {prefix + name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


@torch.no_grad()
def set_weights(model: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        find_weight(parameters, name.removeprefix(prefix), tensor).copy_(tensor)


def find_weight(weights: Mapping[str, Tensor], name: str, recorded: Tensor) -> Tensor:
    """Return the model's weight of a recorded tensor. Raises ValueError if it has no such weight."""
    if name not in weights or weights[name].shape != recorded.shape:
        shape = [*recorded.shape]
        raise ValueError(f"the model has no weight {name} {shape}. Use an intact copy of the recording, or a new one.")
    return weights[name]


@torch.no_grad()
def move_average(average: nn.Module, model: nn.Module, rate: float) -> None:
    """Move the trained weights of a self-teacher towards those of the policy."""
    trained = dict(model.named_parameters())
    for name, parameter in average.named_parameters():
        if trained[name].requires_grad:
            parameter.copy_((1 - rate) * parameter + rate * trained[name])


class OptimizerChain:
    """Optimizer steps with the run's gradients, from its weights before the update.

    Args:
        state, num_steps: of Recording.read_state. options: section `actor` or `critic`.
        total_steps: optimizer steps of the run.
    """

    def __init__(
        self,
        recording: Recording,
        role: str,
        model: nn.Module,
        state: Mapping[str, Tensor],
        num_steps: int,
        options: SimpleNamespace,
        total_steps: int,
    ):
        self.recording, self.role, self.options = recording, role, options
        self.prefix = "model." if role == "policy" else ""
        self.num_steps, self.total_steps, self.num_rounded = num_steps, total_steps, 0
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.start = {name: p.detach().clone() for name, p in self.trained.items()}
        self.states: dict[str, dict[str, Tensor]] = {name: {} for name in self.trained}
        begin = f"optimizer.state.{self.prefix}"
        for key, tensor in state.items():
            if key.startswith(begin):
                name, _, moment = key.removeprefix(begin).rpartition(".")
                self.states[name][moment] = tensor.double()
        self.decayed = optimizers.find_decayed(model)
        self.matrices = optimizers.find_matrices(model) if options.optim.name == "muon" else set()
        self.limit, self.reason = LIMITS.get(options.optim.name, (1e-4, "beyond the rounding of float32 weights"))

    @torch.no_grad()
    def step(self, recorded: Mapping[str, Tensor]) -> None:
        """Take a step with recorded gradients."""
        optim = self.options.optim
        if optim.name == "adamw_8bit":
            raise NotCovered("AdamW with quantized moments")
        gradients = {name.removeprefix(self.prefix): g.double() for name, g in recorded.items()}
        rate = optimizers.learning_rate(self.num_steps, optim, self.total_steps)
        for name, g in optimizers.clip(gradients, self.options.grad_clip).items():
            weight, state = find_weight(self.trained, name, g), self.states[name]
            decay = optim.weight_decay if name in self.decayed else 0.0
            if name in self.matrices:
                weight.copy_(optimizers.muon(weight, g, state, rate, decay))
            else:
                weight.copy_(optimizers.adamw(weight, g, state, rate, optim, decay))
        self.num_steps += 1
        self.num_rounded += 2  # the decay and the step each round the weight

    def compare(self, file: str = "weights") -> Check:
        """Compare the change of the weights with that of the run, after the last or ("weights_1") the first step."""
        recorded = self.recording.read_weights(self.role, file)
        mine = {self.prefix + name: (p - self.start[name]).detach() for name, p in self.trained.items()}
        change = {}
        for key, weight in recorded.items():
            start = find_weight(self.start, key.removeprefix(self.prefix), weight)
            rounding = self.num_rounded * 2.0**-24 * weight.abs()
            error = weight.double() - start - mine[key]
            change[key] = mine[key] + error.sign() * (error.abs() - rounding).clamp(min=0)
        name = "weights" if file == "weights" else "weights after step 1"
        name = name if self.role == "policy" else f"critic: {name}"
        return compare_tensors(name, change, mine, self.limit, f"relative to their change; {self.reason}")
