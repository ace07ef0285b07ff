"""Advantage estimators: inputs, outputs and registry.

@register_estimator("mine", scope="trajectories", group=True)
def mine(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return center_in_groups(trajectories.scores, trajectories.groups)

The scope of an estimator decides how much of a batch is padded to matrices [B, L] at a time: nothing, whole groups, or
the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from alphaapollo.algorithms.statistics import Groups, JoinedTrajectories, move_rewards_to_actions, whiten
from alphaapollo.algorithms.user_functions import FunctionRegistry, check_float_tensor, check_type, explain_user_errors
from alphaapollo.config.schema import Algorithm

Scope = Literal["trajectories", "groups", "batch"]
Need = Literal["values", "greedy_rewards", "components", "turns", "mini_batches"]


@dataclass(frozen=True)
class Turns:
    """The M turns of the trajectories in a batch. Turns of one trajectory are consecutive, and in the order in which
    the model sampled them."""

    turn_of_token: Tensor  # [B, L] int64, 0 .. M-1 on action tokens; -1 on other tokens
    trajectory_ids: Tensor  # [M] int64
    anchor_ids: Tensor  # [M] int64, equal for turns of one group that start from the same environment state

    def sum_rewards(self, token_rewards: Tensor) -> Tensor:
        """Sum the token rewards of each turn. A reward after a turn, e.g. on an observation, counts for
        the turn. [B, L] -> [M]."""
        is_action = self.turn_of_token >= 0
        sums = token_rewards.new_zeros(len(self.trajectory_ids))
        action_rewards = move_rewards_to_actions(token_rewards, is_action)
        return sums.index_add_(0, self.turn_of_token[is_action], action_rewards[is_action])

    def take_first_values(self, values: Tensor) -> Tensor:
        """Return the value at the first action token of each turn; 0 for a turn without tokens. [B, L] -> [M]."""
        is_action = self.turn_of_token >= 0
        positions = torch.arange(is_action.numel()).view_as(is_action)[is_action]
        first_positions = torch.full_like(self.trajectory_ids, is_action.numel())  # default: the 0 that `pad` appends
        first_positions.scatter_reduce_(0, self.turn_of_token[is_action], positions, "amin")
        return torch.nn.functional.pad(values.flatten(), (0, 1))[first_positions]

    def join(self, values: Tensor) -> tuple[Tensor, JoinedTrajectories]:
        """Arrange values of turns in one row per trajectory, 0 after its last turn. [M] -> ([N, K], mapping)."""
        joined = JoinedTrajectories.from_mask(torch.ones_like(values)[:, None], self.trajectory_ids)
        return joined.join(values[:, None]), joined

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Copy the value of each turn to its action tokens; 0 elsewhere. [M] -> [B, L]."""
        return torch.where(self.turn_of_token >= 0, values[self.turn_of_token.clamp(min=0)], 0.0)


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator: B token sequences (rows) of complete groups. Runs pass float64 tensors.

    L is the length of the longest response; column 0 is the first response token of a row. A trajectory usually has one
    row. It has several if a turn or branch starts with a new prompt; `Trajectories` and `join_rows` combine these rows.
    """

    token_rewards: Tensor  # [B, L] rewards after subtracting KL and penalties
    mask: Tensor  # [B, L] 1 on action tokens
    scores: Tensor  # [B] reward of the trajectory, equal in all rows of the trajectory
    group_ids: Tensor  # [B] int64, group (prompt) of each row
    trajectory_ids: Tensor  # [B] int64
    values: Tensor | None = None  # [B, L] values predicted by the critic
    greedy_rewards: Tensor | None = None  # [B] reward of a greedy rollout of the same prompt
    components: dict[str, Tensor] | None = None  # name -> [B], named rewards that the reward function returns
    turns: Turns | None = None  # None: not needed, and the rows of each trajectory are in the order of time
    mini_batches: Tensor | None = None  # [B] int64, index of the mini-batch of each row, equal in a group
    baseline: float = 0.0  # moving average of the returns of earlier iterations

    def join_rows(self) -> tuple[AdvantageInputs, JoinedTrajectories]:
        """Return the inputs with one row per trajectory, its action tokens in the order of time, and the mapping
        between the rows. `turns` remains as it is."""
        times = None if self.turns is None else self.turns.turn_of_token
        joined = JoinedTrajectories.from_mask(self.mask, self.trajectory_ids, times)
        take = joined.rows_by_trajectory.take_value_per_group
        names = ("scores", "group_ids", "trajectory_ids", "greedy_rewards", "mini_batches")
        common: dict[str, Any] = {name: take(value) for name in names if (value := getattr(self, name)) is not None}
        if self.components is not None:
            common["components"] = {name: take(value) for name, value in self.components.items()}
        return replace(
            self,
            **common,
            token_rewards=joined.join(move_rewards_to_actions(self.token_rewards, self.mask)),
            mask=joined.mask,
            values=None if self.values is None else joined.join(self.values),
        ), joined


class Advantages(NamedTuple):
    """Result of an advantage estimator."""

    advantages: Tensor  # [B, L], 0 outside the mask
    returns: Tensor  # [B, L], 0 outside the mask: training targets of the critic; only logged without a critic


EstimatorFn = Callable[[Any, Algorithm], Any]
StartCheck = Callable[[Algorithm, int], None]


@dataclass(frozen=True)
class Estimator:
    """Registered advantage estimator. Calling it computes the advantages of a batch, and checks inputs and result.

    `scope` decides the type of `fn`, and what a run passes to one call:

    * `trajectories`: `fn(Trajectories, Algorithm) -> Tensor [N]`: one advantage per trajectory. Called once per batch.
    * `groups`: `fn(AdvantageInputs, Algorithm) -> Advantages`: called several times, each with some whole groups.
    * `batch`: as `groups`, but called once with all rows, which takes more memory.

    The other fields declare what `fn` needs and supports (checked by trainer/setup/combinations.py).
    """

    name: str
    fn: EstimatorFn
    needs: tuple[Need, ...] = ()  # optional inputs that the trainer must compute
    scope: Scope = "batch"
    whitens: Callable[[Algorithm], bool] = lambda config: False
    """Whether to whiten the advantages over all action tokens, in a second pass. Not with scope trajectories."""
    group: bool = False  # compares the samples of a prompt, and needs a group size of at least 2
    joins_rows: bool = False
    """`fn` gets matrices with one row per trajectory, in the order of time. Not with scope trajectories."""
    per_token: bool = False  # tokens of one trajectory can have different advantages
    compares_states: bool = False  # compares turns that start from the same environment state
    on_policy: bool = False  # is valid for only one optimizer step per iteration
    reads: tuple[str, ...] | None = None  # fields of Algorithm that `fn` reads; None = unknown
    no_shaping_reason: str = ""  # reason why rewards cannot include a KL or penalty; empty = they can
    check: StartCheck | None = None  # (config.algorithm, group size); raises ValueError for unsupported settings

    def __call__(self, inputs: AdvantageInputs, config: Algorithm) -> Advantages:
        """Compute the advantages of a batch of matrices, in any scope."""
        if self.scope == "trajectories":
            self._check_scores(inputs.scores)
            trajectories = Trajectories.from_inputs(inputs)
            return trajectories.expand_to_tokens(self.compute_for_trajectories(trajectories, config))
        result = self.compute_for_groups(inputs, config)
        whitened = whiten(result.advantages, inputs.mask) if self.whitens(config) else result.advantages
        return Advantages(whitened, result.returns)

    def compute_for_trajectories(self, trajectories: Trajectories, config: Algorithm) -> Tensor:
        """Compute one advantage per trajectory, [N], with an estimator of scope trajectories."""
        self._check_scores(trajectories.scores)
        with explain_user_errors(self.fn, str(self)):
            advantages: Tensor = self.fn(trajectories, config)
            check_finite_tensor("the advantages", advantages, trajectories.scores.shape)
        return advantages

    def compute_for_groups(self, inputs: AdvantageInputs, config: Algorithm) -> Advantages:
        """Compute advantages of whole groups, before they are whitened."""
        self._check_scores(inputs.scores)
        with explain_user_errors(self.fn, str(self)):
            fn_inputs, joined = inputs.join_rows() if self.joins_rows else (inputs, None)
            result: Advantages = self.fn(fn_inputs, config)
            check_type(result, Advantages)
            if joined is not None:
                result = Advantages(joined.split(result.advantages), joined.split(result.returns))
            for name in ("advantages", "returns"):
                matrix = getattr(result, name)
                check_finite_tensor(f"the {name}", matrix, inputs.mask.shape)
                if ((matrix != 0) & (inputs.mask == 0)).any():
                    raise ValueError(f"the {name} must be zero outside the action mask; multiply them by the mask")
        return result

    def __str__(self) -> str:
        return f"the advantage estimator {self.name!r}"

    def _check_scores(self, scores: Tensor) -> None:
        if not all_finite(scores):
            raise ValueError(
                f"The rewards of {int((~scores.isfinite()).sum())} samples are NaN or infinite. Return finite "
                "numbers from the reward function."
            )


def check_finite_tensor(name: str, value: Any, shape: Sequence[int]) -> None:
    """Raise ValueError unless `value`, called `name` in the error, is a finite float tensor of this shape."""
    check_float_tensor(name, value, shape)
    if not all_finite(value):
        raise ValueError(f"{name} must be finite, but have NaN or infinite values")


def all_finite(values: Tensor) -> bool:
    """Return whether all values are finite. Checks each value only if the sum is not finite, which is faster."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


_estimators = FunctionRegistry("advantage estimator", "estimators", Estimator, Algorithm)
get_estimator, estimator_names = _estimators.get, _estimators.names
register_estimator = _estimators.declare
"""Decorator that registers an estimator, selected by algorithm.adv_estimator=name; see FunctionRegistry.declare."""


@dataclass(frozen=True)
class Trajectories:
    """The N trajectories of a batch, each of one or several token sequences (rows)."""

    rows_by_trajectory: Groups  # groups the B rows by trajectory
    groups: Groups  # groups the N trajectories by prompt
    scores: Tensor  # [N]
    lengths: Tensor  # [N] number of action tokens over all rows
    mask: Tensor | None = None  # [B, L], None in a run
    components: dict[str, Tensor] | None = None  # name -> [N], named rewards that the reward function returns
    mini_batches: Tensor | None = None  # [N] int64, as in AdvantageInputs

    @classmethod
    def from_inputs(cls, inputs: AdvantageInputs) -> Trajectories:
        """Group the rows of the inputs into trajectories."""
        rows = Groups.from_ids(inputs.trajectory_ids)
        lengths = rows.sum(inputs.mask.to(inputs.scores.dtype).sum(dim=1))
        scores = rows.max(inputs.scores)
        assert rows.is_constant(inputs.scores).all(), "all rows of a trajectory must have the same score"
        take = rows.take_value_per_group
        return cls(
            rows,
            Groups.from_ids(take(inputs.group_ids)),
            scores,
            lengths,
            inputs.mask,
            None if inputs.components is None else {name: take(value) for name, value in inputs.components.items()},
            None if inputs.mini_batches is None else take(inputs.mini_batches),
        )

    def expand_to_tokens(self, advantages: Tensor) -> Advantages:
        """Give every action token the advantage of its trajectory; 0 elsewhere. [N] -> [B, L]."""
        assert self.mask is not None
        token_advantages = advantages[self.rows_by_trajectory.group_index].unsqueeze(1) * self.mask.to(advantages.dtype)
        return Advantages(token_advantages, token_advantages)


def from_scores(inputs: AdvantageInputs, fn: Callable[[Tensor, Groups], Tensor]) -> Advantages:
    """Compute one advantage per trajectory with `fn(scores [N], groups) -> [N]`, and copy it to the action tokens."""
    trajectories = Trajectories.from_inputs(inputs)
    return trajectories.expand_to_tokens(fn(trajectories.scores, trajectories.groups))


NO_ESTIMATOR = "none"


@register_estimator(NO_ESTIMATOR, "scores", scope="trajectories")
def _return_zero_advantages(scores: Tensor) -> Tensor:
    """Return zeros: the reward is not used, e.g. in distillation (docs/algorithms/distill.md)."""
    return torch.zeros_like(scores)
