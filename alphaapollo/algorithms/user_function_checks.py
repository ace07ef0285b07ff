"""Call user-defined estimators and losses on toy inputs before a run starts, and check their results.

Without these checks an invalid result would be detected only after the models are loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import AdvantageInputs, Estimator
from alphaapollo.algorithms.advantages.base import NEEDS, Turns
from alphaapollo.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from alphaapollo.algorithms.preference_losses import AnswerBatch, PreferenceLoss
from alphaapollo.algorithms.result_checks import InvalidResultError, check_float_tensor, require
from alphaapollo.config.schema import Actor, Algorithm, Preference
from alphaapollo.utils.user_module import format_error

GROUPS, LENGTH = 2, 3


def check_user_estimator(estimator: Estimator, config: Algorithm, group_size: int, reward_names: Iterable[str]) -> None:
    """Call an estimator on toy inputs, unless it is built-in, and check its result.

    Raises ValueError if the estimator raises, or does not return Advantages of finite floats shaped like the mask.
    """
    if _is_defined_by_alphaapollo(estimator.fn):
        return
    undeclared: dict[str, Any] = {name: None for name in NEEDS if name not in estimator.needs}
    inputs = replace(make_toy_advantage_inputs(group_size, [*reward_names, *config.gdpo_rewards]), **undeclared)
    with _explain_errors(estimator.fn, str(estimator)):
        estimator(inputs, config)


def check_user_policy_loss(policy_loss: PolicyLoss, config: Actor) -> None:
    """Call a policy loss on toy inputs, unless it is built-in, and check its result.

    Raises ValueError if the function raises, or its loss has the wrong shape, is not finite, or has no gradient.
    """
    if _is_defined_by_alphaapollo(policy_loss.fn):
        return
    with _explain_errors(policy_loss.fn, str(policy_loss)):
        inputs = make_toy_loss_inputs(policy_loss, config)
        result = policy_loss(inputs, config)
        _check_trainable_loss(result.loss[inputs.mask.bool()] if policy_loss.level == "token" else result.loss)
        for name, value in result.metrics.items():
            check_float_tensor(f"the metric {name!r} of {policy_loss}", value, ())


def check_preference_loss(loss: PreferenceLoss, config: Preference) -> None:
    """Call a preference loss on two pairs or four single answers, and check its result.

    Raises ValueError if the function raises, or its result has the wrong shape, is not finite, or has no gradient.
    """
    logp = torch.tensor([-2.0, -3.0, -4.0, -2.5], requires_grad=True)
    answers = AnswerBatch(
        logp,
        lengths=torch.tensor([2, 3, 2, 1]),
        is_desirable=torch.tensor([True, False, True, False]),
        ref_logp=logp.detach() - 0.1 if loss.needs_reference else None,
        kl=None if loss.is_pairwise else torch.tensor(0.1),
    )
    if _is_defined_by_alphaapollo(loss.fn):
        loss(answers, config)  # raises ValueError for invalid values of config keys
        return
    with _explain_errors(loss.fn, str(loss)):
        _check_trainable_loss(loss(answers, config).losses)


def _check_trainable_loss(losses: Tensor) -> None:
    """Raise InvalidResultError unless the losses are finite and have a gradient."""
    require(bool(losses.isfinite().all()), f"its loss must be finite, but is {losses.tolist()}.")
    require(losses.requires_grad, "its loss has no gradient, because it does not depend on the log-probs.")
    losses.sum().backward()


def has_gradient_without_advantages(policy_loss: PolicyLoss, config: Actor) -> bool:
    """Return whether a policy loss has a gradient on toy inputs with advantages 0, e.g. from a KL penalty. The result
    for a user-defined loss is True, because a term with a threshold may be inactive on toy inputs."""
    if not _is_defined_by_alphaapollo(policy_loss.fn):
        return True
    inputs = make_toy_loss_inputs(policy_loss, config)
    selected = None if policy_loss.select_tokens is None else inputs.mask.bool()
    inputs = replace(inputs, advantages=torch.zeros_like(inputs.advantages), selected_tokens=selected)
    loss = policy_loss.fn(inputs, config).loss
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.logp, materialize_grads=True)
    return bool(gradient.nan_to_num(nan=1.0).any())


def make_toy_advantage_inputs(group_size: int, reward_names: Iterable[str]) -> AdvantageInputs:
    """Create two groups of `group_size` responses with lengths 1, 2, 3, 1, ... and rewards 0, 1, 0, 1, ..."""
    rows = GROUPS * group_size
    lengths = torch.arange(rows) % LENGTH + 1
    mask = (torch.arange(LENGTH) < lengths[:, None]).double()
    scores = (torch.arange(rows) % 2).double()
    ids = torch.arange(rows)
    token_rewards = torch.zeros_like(mask)
    token_rewards[ids, lengths - 1] = scores
    return AdvantageInputs(
        token_rewards=token_rewards,
        mask=mask,
        scores=scores,
        group_ids=ids // group_size,
        trajectory_ids=ids,
        values=0.5 * mask,
        greedy_rewards=torch.ones_like(scores),
        components={name: scores.clone() for name in ("accuracy", "task", *reward_names)},
        turns=Turns(torch.where(mask.bool(), ids[:, None], -1), ids, ids // group_size),
        mini_batches=ids // group_size,
    )


def make_toy_loss_inputs(policy_loss: PolicyLoss, config: Actor) -> PolicyLossInputs:
    """Create inputs of two responses with three and two tokens, with `selected_tokens` if the loss selects tokens."""
    logp = torch.tensor([[-0.5, -1.0, -1.5], [-1.0, -0.5, 0.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
    old = logp.detach() - 0.1
    selected = None
    if policy_loss.select_tokens is not None:
        inside = mask.bool()
        selected = torch.zeros_like(inside)
        selected[inside] = policy_loss.select_tokens(old[inside], advantages[inside], config)
    return PolicyLossInputs(logp, old, advantages, mask, rollout_logp=old - 0.1, selected_tokens=selected)


def _is_defined_by_alphaapollo(function: Callable[..., object]) -> bool:
    return function.__module__.startswith("alphaapollo.")


@contextmanager
def _explain_errors(function: Callable[..., object], label: str) -> Iterator[None]:
    """Context manager: convert any error to a one-line ValueError that names the user's function and its file.

    label: e.g. "the policy loss 'mine'".
    """
    file = Path(inspect.getsourcefile(function) or "?")
    try:
        yield
    except InvalidResultError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 the user's code may raise anything
        reason = f"it raised {format_error(error, file)}."
    else:
        return
    raise ValueError(f"{file}: {label} failed a test call on toy inputs: {reason} Fix {function.__name__}().")
