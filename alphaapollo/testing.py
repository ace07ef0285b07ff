"""Test an advantage estimator or a policy loss of your own: random inputs, and checks of what a run relies on
(docs/algorithms/custom.md).

def test_mine():
    check_estimator("mine")
    check_policy_loss("my_loss")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import Advantages, Estimator, get_estimator
from alphaapollo.algorithms.advantages.base import AdvantageInputs, Need, Turns
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss
from alphaapollo.algorithms.policy_losses.base import PolicyLossInputs
from alphaapollo.algorithms.statistics import apply_mask
from alphaapollo.algorithms.user_functions import check_finite_gradient, explain_user_errors, is_own
from alphaapollo.config.schema import Actor, Algorithm

InputsT = TypeVar("InputsT", AdvantageInputs, PolicyLossInputs)
OUTSIDE = {"mask": 0, "token_rewards": 0, "values": 0, "turns": -1}
STEP, TOLERANCE = 1e-6, 1e-5  # of finite differences in float64, and the largest difference that is rounding


class _Components(dict[str, Tensor]):
    """Components of any name, because a test does not know what the reward function returns."""

    def __missing__(self, name: str) -> Tensor:
        return self["task"]

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: object = None) -> Tensor:
        return self[name]


def make_estimator_inputs(prompts: int = 3, samples: int = 4, length: int = 5, seed: int = 0) -> AdvantageInputs:
    """Make random inputs with all optional fields: one row of 1 to `length` action tokens per trajectory, [prompts *
    samples, length], of one turn each, with its reward (0 or 1) at the last token. float64."""
    generator, rows = torch.Generator().manual_seed(seed), prompts * samples
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).double()
    scores = torch.randint(2, (rows,), generator=generator).double()
    is_last = torch.arange(length) == lengths - 1
    ids, groups = torch.arange(rows), torch.arange(rows) // samples
    turns = Turns(torch.where(mask.bool(), ids[:, None], -1), ids, groups)
    return AdvantageInputs(
        token_rewards=scores[:, None] * is_last,
        mask=mask,
        scores=scores,
        group_ids=groups,
        trajectory_ids=ids,
        values=torch.randn(rows, length, generator=generator, dtype=torch.float64) * mask,
        greedy_rewards=torch.ones(rows, dtype=torch.float64),
        components=_Components(task=scores),
        turns=turns,
        mini_batches=torch.zeros(rows, dtype=torch.int64),
    )


def make_loss_inputs(rows: int = 4, length: int = 5, seed: int = 0) -> PolicyLossInputs:
    """Make random inputs of `rows` trajectories with 1 to `length` action tokens. The ratios are about 0.7 to 1.4, and
    advantages have both signs; `logp` has a gradient. float64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(rows, length, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    old = -1.0 - draw(0.5).abs()
    return PolicyLossInputs(
        logp=(old + draw(0.1)).requires_grad_(),
        old_logp=old,
        advantages=draw(1.0),
        mask=(torch.arange(length) < lengths).double(),
        rollout_logp=old + draw(0.01),
        selected_tokens=torch.ones(rows, length, dtype=torch.bool),
    )


def check_estimator(name: str, config: Algorithm | None = None, seed: int = 0, **sizes: int) -> Advantages:
    """Check that a registered estimator returns finite values of the right shape, 0 outside the mask, which depend
    neither on the order of the trajectories nor on padding. sizes: see make_estimator_inputs. Returns its result.
    Raises AssertionError, or ValueError with the file of the estimator."""
    estimator, settings = get_estimator(name), config or Algorithm()
    inputs = _keep_needed(make_estimator_inputs(seed=seed, **sizes), estimator)
    result = _call(estimator, inputs, settings)
    order = torch.randperm(len(inputs.scores), generator=torch.Generator().manual_seed(seed))
    shuffled = estimator(_take_rows(inputs, order), settings)
    padded = estimator(_pad(inputs), settings)
    for field, values in result._asdict().items():
        _check_equal(f"{field} after a change of the order", getattr(shuffled, field), values[order])
        _check_equal(f"{field} with padding", getattr(padded, field)[:, :-1], values)
    return result


def check_policy_loss(name: str, config: Actor | None = None, seed: int = 0, stops_gradient: bool = False) -> Tensor:
    """Check that a registered policy loss returns finite values of the right shape, that padding does not change them,
    that a row has the same loss alone, as in another micro-batch, that metrics of rows add up, and that the gradient
    equals finite differences, unless the loss stops a gradient on purpose (`detach`). Returns the loss. Raises as
    check_estimator does."""
    loss, settings, inputs = get_policy_loss(name), config or Actor(), make_loss_inputs(seed=seed)
    output = _call(loss, inputs, settings)
    values, padded = output.loss, loss(_pad(inputs), settings).loss
    _check_equal("the loss with padding", padded[:, :-1] if padded.ndim == 2 else padded, values)
    alone = [loss(row, settings) for row in _split_rows(inputs)]
    for index, one in enumerate(alone):
        _check_equal(f"the loss of row {index} alone", one.loss[0], values[index])
    for name, value in output.metrics.items():
        combine = torch.amax if name.endswith("_max") else torch.sum
        _check_equal(
            f"the metric {name!r}, added up over rows,",
            combine(torch.stack([one.metrics[name] for one in alone])),
            value,
        )
    if stops_gradient:
        return values
    (gradient,) = torch.autograd.grad(_sum_loss(loss, inputs, settings), inputs.logp)
    for row, column in inputs.mask.nonzero().tolist():
        moved = [inputs.logp.detach().clone().requires_grad_() for _ in range(2)]
        for logp, step in zip(moved, (STEP, -STEP), strict=True):
            logp.data[row, column] += step
        above, below = (_sum_loss(loss, replace(inputs, logp=logp), settings).detach() for logp in moved)
        _check_equal(f"the gradient at row {row}, token {column}", gradient[row, column], (above - below) / (2 * STEP))
    return values


def try_user_functions(
    estimator: Estimator, loss: PolicyLoss, algorithm: Algorithm, actor: Actor, samples: int
) -> None:
    """Call an estimator and a loss with a tiny batch, unless they are the project's. samples: size of a group. Raises
    ValueError with file and function for an error, another type or shape, inputs that are read but not declared or
    changed in place, values, metrics or a gradient that are not finite, and metrics with other names in another
    call."""
    if not is_own(estimator.fn):
        _call(estimator, _keep_needed(make_estimator_inputs(2, samples), estimator), algorithm)
    inputs = make_loss_inputs()
    if loss.select_tokens is not None:
        loss.choose_tokens(inputs.old_logp.flatten(), inputs.advantages.flatten(), actor)
    if not is_own(loss.fn):
        metrics = _call(loss, inputs, actor).metrics
        others = [loss(row, actor).metrics for row in _split_rows(inputs)]
        total = _sum_loss(loss, inputs, actor)
        with explain_user_errors(loss.fn, str(loss)):
            check_finite_gradient(total, inputs.logp)
            if infinite := [name for name, value in metrics.items() if not value.isfinite()]:
                raise ValueError(f"the metric {infinite[0]!r} is not finite for inputs that are")
            if any(other.keys() != metrics.keys() for other in others):
                raise ValueError("the metrics have other names for another batch. Return 0 for one that does not apply")


def _call(function: Any, inputs: Any, config: Any) -> Any:
    """Call an estimator or a loss. Raises ValueError if it changes its inputs in place."""
    versions = _list_versions(inputs)
    result = function(inputs, config)
    with explain_user_errors(function.fn, str(function)):
        if _list_versions(inputs) != versions:
            raise ValueError("it changes its inputs in place, which other parts of a run use, too")
    return result


def _list_versions(inputs: InputsT) -> list[int]:
    """List how many times each tensor of the inputs was changed in place."""
    versions: list[int] = []

    def note(_: str, values: Tensor) -> Tensor:
        versions.append(values._version)
        return values

    _map_tensors(inputs, note)
    return versions


def _keep_needed(inputs: AdvantageInputs, estimator: Estimator) -> AdvantageInputs:
    """Leave out the optional inputs that an estimator does not declare, as a run does."""
    unknown: dict[str, Any] = dict.fromkeys(set(get_args(Need)) - set(estimator.needs))
    return replace(inputs, **unknown)


def _sum_loss(loss: PolicyLoss, inputs: PolicyLossInputs, config: Actor) -> Tensor:
    """Sum loss and penalty over action tokens or sequences."""
    output = loss(inputs, config)
    values = output.loss + output.penalty
    return (apply_mask(values, inputs.mask) if values.ndim == 2 else values).sum()


def _map_tensors(inputs: InputsT, change: Callable[[str, Tensor], Tensor]) -> InputsT:
    """Change each tensor of the rows: change(name of the field, tensor)."""
    changed: dict[str, Any] = {}
    for field in fields(inputs):
        name, value = field.name, getattr(inputs, field.name)
        if isinstance(value, Tensor):
            changed[name] = change(name, value)
        elif isinstance(value, dict):
            changed[name] = type(value)({key: change(name, one) for key, one in value.items()})
        elif isinstance(value, Turns):  # one turn per row, which keeps its number
            changed[name] = replace(value, turn_of_token=change(name, value.turn_of_token))
    return replace(inputs, **changed)


def _split_rows(inputs: PolicyLossInputs) -> list[PolicyLossInputs]:
    """Return a micro-batch for each row."""
    return [_take_rows(inputs, torch.tensor([row])) for row in range(len(inputs.mask))]


def _take_rows(inputs: InputsT, rows: Tensor) -> InputsT:
    return _map_tensors(inputs, lambda _, values: values[rows])


def _pad(inputs: InputsT) -> InputsT:
    """Add a column outside the mask: OUTSIDE in the matrices that have a known value there, 1 in the others."""

    def add_column(name: str, values: Tensor) -> Tensor:
        column = torch.full_like(values[:, :1], OUTSIDE.get(name, 1)) if values.ndim == 2 else values[:0]
        return torch.cat([values, column], dim=-1)

    return _map_tensors(inputs, add_column)


def _check_equal(what: str, found: Tensor, expected: Tensor) -> None:
    largest = (found - expected).abs().max().item()
    assert largest <= TOLERANCE * max(1.0, expected.abs().max().item()), f"{what} differs by {largest:.3g}"
