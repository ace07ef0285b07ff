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
    """The M turns of a batch; turns of one trajectory are consecutive and in order."""

    index: Tensor  # [B, L] int64, the turn that each action token belongs to; -1 off the mask
    trajectory_ids: Tensor  # [M] int64
    anchors: Tensor  # [M] int64, equal for turns of one group that start from the same state

    def rewards(self, token_rewards: Tensor) -> Tensor:
        """Sum of the token rewards of each turn. [B, L] -> [M]."""
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
    turns. Group statistics count trajectories (see Trajectories); credit assignment crosses rows of a trajectory (see
    JoinedTrajectories).
    """

    token_rewards: Tensor  # [B, L] reward per token, including KL and penalties
    mask: Tensor  # [B, L] 1 on action tokens
    scores: Tensor  # [B] reward of the trajectory, equal on all its rows
    group_ids: Tensor  # [B] int64, the prompt
    trajectory_ids: Tensor  # [B] int64
    values: Tensor | None = None  # [B, L] of the critic
    greedy_rewards: Tensor | None = None  # [B] score of the prompt's greedy rollout
    components: dict[str, Tensor] | None = None  # name -> [B], named parts of the score
    turns: Turns | None = None
    mini_batches: Tensor | None = None  # [B] int64, optimizer step of each row; groups are not split


@dataclass(frozen=True)
class Advantages:
    """Result of an estimator. Both [B, L], zero off the mask. `returns` are the critic's targets, else only logged."""

    advantages: Tensor
    returns: Tensor


EstimatorFn = Callable[[AdvantageInputs, Algorithm], Advantages]
StartCheck = Callable[[Algorithm, int], None]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator. Calling it checks inputs and result.

    trainer/setup/combinations.py uses these declarations to reject invalid combinations when a run starts.
    """

    name: str
    fn: EstimatorFn
    needs: tuple[str, ...] = ()  # from NEEDS: inputs that the trainer must compute
    group: bool = False  # compares the samples of a prompt: needs a group size of at least 2
    per_token: bool = False  # the tokens of a trajectory have different advantages
    on_policy: bool = False  # valid for one optimizer step per iteration
    reads: tuple[str, ...] | None = None  # fields of Algorithm that it reads; None = unknown
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
            raise ValueError(f"{self} needs {', '.join(missing)}, but the batch does not have it.")
        if not (is_finite(inputs.scores) and is_finite(inputs.token_rewards)):
            bad = ~(inputs.scores.isfinite() & inputs.token_rewards.isfinite().all(dim=1))
            ids = inputs.trajectory_ids[bad].unique().tolist()
            raise ValueError(
                f"rewards of {len(ids)} trajectories are NaN or infinite (ids {ids[:8]}). Return finite numbers from "
                "the reward function, and exclude failed trajectories before computing advantages."
            )

    def _check_matrix(self, what: str, matrix: Tensor, mask: Tensor) -> None:
        what = f"the {what} of {self}"
        check_floats(what, matrix, mask.shape)
        require(is_finite(matrix), f"{what} must be finite, but have NaN or infinite values.")
        require(
            not has_values_off_mask(matrix, mask), f"{what} must be zero outside the action mask. Multiply them by it."
        )


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. The sum is a fast test unless finite values overflow."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def has_values_off_mask(matrix: Tensor, mask: Tensor) -> bool:
    """Whether any value off the mask is non-zero. Works on blocks of rows, so that temporaries fit into the CPU
    cache."""
    pairs = zip(matrix.split(64), mask.split(64), strict=True)
    return any(((some.numpy() != 0) & (own.numpy() == 0)).any() for some, own in pairs)


_estimators: Registry[Estimator] = Registry("advantage estimator")
get_estimator = _estimators.get
estimator_names = _estimators.names


def register_estimator(name: str, **declarations: Any) -> Callable[[EstimatorFn], EstimatorFn]:
    """Decorator: register `fn(inputs, config.algorithm) -> Advantages` under algorithm.adv_estimator=name.

    `declarations`: fields of `Estimator`, all optional. With `reads`, a run warns about keys without effect.
    """
    unknown = set(declarations.get("needs", ())) - set(NEEDS)
    if unknown:
        raise ValueError(f"estimator {name!r} needs {sorted(unknown)}; only {', '.join(NEEDS)} are available.")

    def add(fn: EstimatorFn) -> EstimatorFn:
        _estimators.register(name)(Estimator(name, fn, **declarations))
        return fn

    return add


@dataclass(frozen=True)
class Trajectories:
    """A batch of rows grouped into N trajectories."""

    rows: Groups  # trajectory of each row; index [B]
    groups: Groups  # group of each trajectory; index [N]
    scores: Tensor  # [N]
    lengths: Tensor  # [N] action tokens over all rows
    mask: Tensor  # [B, L]

    @classmethod
    def from_inputs(cls, inputs: AdvantageInputs) -> Trajectories:
        rows = Groups.from_ids(inputs.trajectory_ids)
        lengths = rows.sum(inputs.mask.to(inputs.scores.dtype).sum(dim=1))
        scores = rows.max(inputs.scores)
        assert rows.equal(inputs.scores).all(), "rows of one trajectory must share its score"
        return cls(rows, Groups.from_ids(rows.first(inputs.group_ids)), scores, lengths, inputs.mask)

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Copy the value of each trajectory to its action tokens; zero elsewhere. [N] -> [B, L]."""
        return values[self.rows.index].unsqueeze(1) * self.mask.to(values.dtype)


def from_scores(inputs: AdvantageInputs, fn: Callable[[Tensor, Groups], Tensor]) -> Advantages:
    """Advantages from one score per trajectory: fn(scores [N], groups) -> [N]."""
    trajectories = Trajectories.from_inputs(inputs)
    advantages = trajectories.expand_to_tokens(fn(trajectories.scores, trajectories.groups))
    return Advantages(advantages, advantages)
