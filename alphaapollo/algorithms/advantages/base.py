"""What an advantage estimator is, and where it is registered.

@register_estimator("mine", group=True)
def mine(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    return from_scores(inputs, lambda scores, groups: deviations(scores, groups))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alphaapollo.algorithms.groups import Groups
from alphaapollo.config.schema import Algorithm
from alphaapollo.utils.registry import Registry

NEEDS = ("values", "greedy_rewards", "components", "turns", "mini_batches")


@dataclass(frozen=True)
class Turns:
    """The M turns of a batch; those of one trajectory stand together, in their order."""

    index: Tensor  # [B, L] int64, the turn that each action token belongs to; -1 off the mask
    trajectory_ids: Tensor  # [M] int64
    anchors: Tensor  # [M] int64, equal for turns of one group that start from the same state

    def rewards(self, token_rewards: Tensor) -> Tensor:
        """What the tokens of each turn were given. [B, L] -> [M]."""
        inside = self.index >= 0
        sums = token_rewards.new_zeros(len(self.trajectory_ids))
        return sums.index_add_(0, self.index[inside], token_rewards[inside])

    def on_tokens(self, values: Tensor) -> Tensor:
        """One number a turn on each of its action tokens, zero elsewhere. [M] -> [B, L]."""
        return torch.where(self.index >= 0, values[self.index.clamp(min=0)], 0.0)


@dataclass(frozen=True)
class AdvantageInputs:
    """A batch as estimators see it, response-aligned: B rows, L = longest response. Any float dtype (we use float64).

    Rows of one trajectory (one a turn, in memory context) share a trajectory id and stand in the order of its turns.
    Group statistics count trajectories (see Trajectories), and credit runs across a trajectory's rows (see JoinedTrajectories).
    """

    token_rewards: Tensor  # [B, L] rewards token by token, KL and penalties included
    mask: Tensor  # [B, L] 1 on action tokens
    scores: Tensor  # [B] the whole trajectory's reward, the same on each of its rows
    group_ids: Tensor  # [B] int64, the prompt
    trajectory_ids: Tensor  # [B] int64
    values: Tensor | None = None  # [B, L] the critic's
    greedy_rewards: Tensor | None = None  # [B] score of the prompt's greedy rollout
    components: dict[str, Tensor] | None = None  # name -> [B] the parts of the score
    turns: Turns | None = None
    mini_batches: Tensor | None = None  # [B] int64, the optimiser step that each row is for; groups are not split


@dataclass(frozen=True)
class Advantages:
    """Both [B, L], zero off the mask. `returns` are the critic's targets; without a critic they are only looked at."""

    advantages: Tensor
    returns: Tensor


EstimatorFn = Callable[[AdvantageInputs, Algorithm], Advantages]
StartCheck = Callable[[Algorithm, int], None]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator. Call it: inputs and result are checked.

    What goes together is decided from these declarations when a run starts (trainer/setup/combinations.py).
    """

    name: str
    fn: EstimatorFn
    needs: tuple[str, ...] = ()  # of NEEDS: what the trainer must compute for it
    group: bool = False  # compares the samples of a prompt: needs a group size of at least 2
    per_token: bool = False  # the tokens of a trajectory have different advantages
    on_policy: bool = False  # derived for one optimiser step an iteration
    reads: tuple[str, ...] | None = None  # fields of Algorithm that it reads; None = unknown
    no_shaping: str = ""  # why no KL or penalty may be taken off its rewards; empty = it may
    check: StartCheck | None = None  # (config.algorithm, group size); raises ValueError for what it cannot do

    def __call__(self, inputs: AdvantageInputs, config: Algorithm) -> Advantages:
        self._check_inputs(inputs)
        result = self.fn(inputs, config)
        self._check_matrix("advantages", result.advantages, inputs.mask)
        if result.returns is not result.advantages:
            self._check_matrix("returns", result.returns, inputs.mask)
        return result

    def _check_inputs(self, inputs: AdvantageInputs) -> None:
        missing = [need for need in self.needs if getattr(inputs, need) is None]
        if missing:
            raise ValueError(f"advantage estimator {self.name!r} needs {', '.join(missing)}, which the batch lacks.")
        if not (all_finite(inputs.scores) and all_finite(inputs.token_rewards)):
            bad = ~(inputs.scores.isfinite() & inputs.token_rewards.isfinite().all(dim=1))
            ids = inputs.trajectory_ids[bad].unique().tolist()
            raise ValueError(
                f"rewards of {len(ids)} trajectories are NaN or infinite (ids {ids[:8]}); a reward must be a finite "
                "number, and failed trajectories are left out before the advantages."
            )

    def _check_matrix(self, what: str, matrix: Tensor, mask: Tensor) -> None:
        if matrix.shape != mask.shape:
            raise ValueError(
                f"advantage estimator {self.name!r} returned {what} of shape {tuple(matrix.shape)}; "
                f"it must be that of the mask, {tuple(mask.shape)}."
            )
        if not all_finite(matrix):
            raise ValueError(f"advantage estimator {self.name!r} returned {what} that are not finite.")
        if any_off_mask(matrix, mask):
            raise ValueError(f"advantage estimator {self.name!r} returned {what} off the action mask; multiply by it.")


def all_finite(values: Tensor) -> bool:
    """Neither NaN nor infinite. A sum tells it at once, unless finite values overflow it."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def any_off_mask(matrix: Tensor, mask: Tensor) -> bool:
    """Anything but zeros off the mask? Rows by rows: what they need in between then stays in the processor's cache."""
    pairs = zip(matrix.split(64), mask.split(64), strict=True)
    return any(((some.numpy() != 0) & (own.numpy() == 0)).any() for some, own in pairs)


_estimators: Registry[Estimator] = Registry("advantage estimator")


def register_estimator(
    name: str,
    *,
    needs: tuple[str, ...] = (),
    group: bool = False,
    per_token: bool = False,
    on_policy: bool = False,
    reads: tuple[str, ...] | None = None,
    no_shaping: str = "",
    check: StartCheck | None = None,
) -> Callable[[EstimatorFn], EstimatorFn]:
    """Decorator: register `fn(inputs, config.algorithm) -> Advantages` under algorithm.adv_estimator=name.

    The options are the fields of `Estimator`; all are optional. With `reads`, a run tells of keys set in vain.
    """
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise ValueError(f"estimator {name!r} needs {sorted(unknown)}; only {', '.join(NEEDS)} can be asked for.")

    def add(fn: EstimatorFn) -> EstimatorFn:
        _estimators.register(name)(Estimator(name, fn, needs, group, per_token, on_policy, reads, no_shaping, check))
        return fn

    return add


def get_estimator(name: str) -> Estimator:
    """The estimator of that name. Raises ValueError with the known and the nearest names."""
    return _estimators.get(name)


def estimator_names() -> list[str]:
    return _estimators.names()


@dataclass(frozen=True)
class Trajectories:
    """The rows of a batch seen as N trajectories."""

    rows: Groups  # which trajectory each row belongs to; index [B]
    groups: Groups  # which group each trajectory belongs to; index [N]
    scores: Tensor  # [N]
    lengths: Tensor  # [N] action tokens over all rows
    mask: Tensor  # [B, L]

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> Trajectories:
        rows = Groups.of(inputs.trajectory_ids)
        lengths = rows.sum(inputs.mask.to(inputs.scores.dtype).sum(dim=1))
        scores = rows.max(inputs.scores)
        assert rows.equal(inputs.scores).all(), "rows of one trajectory must share its score"
        return cls(rows, Groups.of(_first_of(rows, inputs.group_ids)), scores, lengths, inputs.mask)

    def per_trajectory(self, values: Tensor) -> Tensor:
        """[B], the same on all rows of a trajectory -> [N]."""
        return _first_of(self.rows, values)

    def on_tokens(self, values: Tensor) -> Tensor:
        """One number a trajectory on each of its action tokens, zero elsewhere. [N] -> [B, L]."""
        return values[self.rows.index].unsqueeze(1) * self.mask.to(values.dtype)


def _first_of(rows: Groups, values: Tensor) -> Tensor:
    """One entry of each trajectory. [B] -> [N]."""
    first = torch.empty(len(rows.sizes), dtype=values.dtype, device=values.device)
    first[rows.index] = values
    return first


def from_scores(inputs: AdvantageInputs, fn: Callable[[Tensor, Groups], Tensor]) -> Advantages:
    """Advantages of an estimator that sees one score a trajectory: fn(scores [N], groups) -> [N]."""
    trajectories = Trajectories.of(inputs)
    advantages = trajectories.on_tokens(fn(trajectories.scores, trajectories.groups))
    return Advantages(advantages, advantages)
