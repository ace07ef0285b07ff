"""Advantage estimators: inputs, outputs and registry.

@register_estimator("mine", group=True)
def mine(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    return from_scores(inputs, lambda scores, groups: center_in_groups(scores, groups))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alphaapollo.algorithms.group_statistics import Groups
from alphaapollo.algorithms.result_checks import check_floats, check_type, require
from alphaapollo.config.schema import Algorithm
from alphaapollo.utils.registry import Registry

NEEDS = ("values", "greedy_rewards", "components", "turns", "mini_batches")


@dataclass(frozen=True)
class Turns:
    """The M turns of the trajectories in a batch; turns of one trajectory are consecutive and in order."""

    index: Tensor  # [B, L] int64, turn of each action token; -1 off the mask
    trajectory_ids: Tensor  # [M] int64
    anchors: Tensor  # [M] int64, equal for turns of one group that start from the same state

    def rewards(self, token_rewards: Tensor) -> Tensor:
        """Compute the sum of the token rewards of each turn. [B, L] -> [M]."""
        inside = self.index >= 0
        sums = token_rewards.new_zeros(len(self.trajectory_ids))
        return sums.index_add_(0, self.index[inside], token_rewards[inside])

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Copy the value of each turn to its action tokens; zero elsewhere. [M] -> [B, L]."""
        return torch.where(self.index >= 0, values[self.index.clamp(min=0)], 0.0)


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator, response-aligned: B rows, L = longest response. Any float dtype; runs use float64.

    In memory context a trajectory has one row per turn. These rows share a trajectory id and are in the order of the
    turns. Group statistics count trajectories (see Trajectories). Credit assignment crosses the rows of a trajectory
    (see JoinedTrajectories).
    """

    token_rewards: Tensor  # [B, L] reward per token, including KL and penalties
    mask: Tensor  # [B, L] 1 on action tokens
    scores: Tensor  # [B] reward of the trajectory, equal in all rows of the trajectory
    group_ids: Tensor  # [B] int64, group (prompt) of each row
    trajectory_ids: Tensor  # [B] int64
    values: Tensor | None = None  # [B, L] values predicted by the critic
    greedy_rewards: Tensor | None = None  # [B] score of the prompt's greedy rollout
    components: dict[str, Tensor] | None = None  # name -> [B], named rewards of the reward function
    turns: Turns | None = None
    mini_batches: Tensor | None = None  # [B] int64, index of the mini-batch of each row; no group is split


@dataclass(frozen=True)
class Advantages:
    """Result of an estimator."""

    advantages: Tensor  # [B, L], zero off the mask
    returns: Tensor  # [B, L], zero off the mask: training targets of the critic; only logged without a critic


EstimatorFn = Callable[[AdvantageInputs, Algorithm], Advantages]
StartCheck = Callable[[Algorithm, int], None]


@dataclass(frozen=True)
class Estimator:
    """Registered advantage estimator that checks its inputs and its result when called.

    trainer/setup/combinations.py uses the declarations below to reject invalid combinations when a run starts.
    """

    name: str
    fn: EstimatorFn
    needs: tuple[str, ...] = ()  # names from NEEDS: optional inputs that the trainer must compute
    group: bool = False  # compares the samples of a prompt, and needs a group size of at least 2
    per_token: bool = False  # tokens of one trajectory can have different advantages
    on_policy: bool = False  # is valid for only one optimizer step per iteration
    reads: tuple[str, ...] | None = None  # fields of Algorithm that `fn` reads; None = unknown
    no_shaping_reason: str = ""  # reason why rewards cannot include a KL or penalty; empty = they can
    check: StartCheck | None = None  # (config.algorithm, group size); raises ValueError for unsupported settings

    def __call__(self, inputs: AdvantageInputs, config: Algorithm) -> Advantages:
        self._check_inputs(inputs)
        result = self.fn(inputs, config)
        check_type(str(self), result, Advantages)
        self._check_matrix("advantages", result.advantages, inputs.mask)
        if result.returns is not result.advantages:
            self._check_matrix("returns", result.returns, inputs.mask)
        return result

    def __str__(self) -> str:
        return f"the advantage estimator {self.name!r}"

    def _check_inputs(self, inputs: AdvantageInputs) -> None:
        missing = [need for need in self.needs if getattr(inputs, need) is None]
        if missing:
            raise ValueError(f"{self} needs {', '.join(missing)}, which the batch does not contain.")
        if not (is_finite(inputs.scores) and is_finite(inputs.token_rewards)):
            invalid = ~(inputs.scores.isfinite() & inputs.token_rewards.isfinite().all(dim=1))
            ids = inputs.trajectory_ids[invalid].unique().tolist()
            raise ValueError(
                f"The rewards of {len(ids)} trajectories are NaN or infinite (ids {ids[:8]}). Return finite numbers "
                "from the reward function, and exclude failed trajectories before computing advantages."
            )

    def _check_matrix(self, name: str, matrix: Tensor, mask: Tensor) -> None:
        name = f"the {name} of {self}"
        check_floats(name, matrix, mask.shape)
        require(is_finite(matrix), f"{name} must be finite, but have NaN or infinite values.")
        require(
            not has_values_off_mask(matrix, mask),
            f"{name} must be zero outside the action mask. Multiply them by the mask.",
        )


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite. The sum is tested first, because that is fast."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def has_values_off_mask(matrix: Tensor, mask: Tensor) -> bool:
    """Return whether any value off the mask is non-zero. Temporaries of 64 rows fit into the CPU cache."""
    pairs = zip(matrix.split(64), mask.split(64), strict=True)
    return any(((values.numpy() != 0) & (block_mask.numpy() == 0)).any() for values, block_mask in pairs)


_estimators: Registry[Estimator] = Registry("advantage estimator")
get_estimator = _estimators.get
estimator_names = _estimators.names


def register_estimator(name: str, **declarations: Any) -> Callable[[EstimatorFn], EstimatorFn]:
    """Return a decorator that registers an estimator under algorithm.adv_estimator=name.

    The decorated function is `fn(inputs, config.algorithm) -> Advantages`. declarations: fields of `Estimator`, all
    optional. With `reads`, a run warns about keys without effect.
    """
    unknown = set(declarations.get("needs", ())) - set(NEEDS)
    if unknown:
        raise ValueError(
            f"The estimator {name!r} has needs={sorted(unknown)}. The available inputs are {', '.join(NEEDS)}."
        )

    def add(fn: EstimatorFn) -> EstimatorFn:
        _estimators.register(name)(Estimator(name, fn, **declarations))
        return fn

    return add


@dataclass(frozen=True)
class Trajectories:
    """The N trajectories of a batch, with their scores, lengths and groups."""

    rows: Groups  # trajectory of each row; index [B]
    groups: Groups  # group of each trajectory; index [N]
    scores: Tensor  # [N]
    lengths: Tensor  # [N] number of action tokens over all rows
    mask: Tensor  # [B, L]

    @classmethod
    def from_inputs(cls, inputs: AdvantageInputs) -> Trajectories:
        """Group the rows of the inputs into trajectories."""
        rows = Groups.from_ids(inputs.trajectory_ids)
        lengths = rows.sum(inputs.mask.to(inputs.scores.dtype).sum(dim=1))
        scores = rows.max(inputs.scores)
        assert rows.is_constant(inputs.scores).all(), "all rows of a trajectory must have the same score"
        return cls(rows, Groups.from_ids(rows.first(inputs.group_ids)), scores, lengths, inputs.mask)

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Copy the value of each trajectory to its action tokens; zero elsewhere. [N] -> [B, L]."""
        return values[self.rows.index].unsqueeze(1) * self.mask.to(values.dtype)


def from_scores(inputs: AdvantageInputs, fn: Callable[[Tensor, Groups], Tensor]) -> Advantages:
    """Compute advantages from one score per trajectory with `fn(scores [N], groups) -> [N]`."""
    trajectories = Trajectories.from_inputs(inputs)
    advantages = trajectories.expand_to_tokens(fn(trajectories.scores, trajectories.groups))
    return Advantages(advantages, advantages)
