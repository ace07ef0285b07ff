"""Errors of user functions name the file, the function and the problem, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss, policy_loss_names
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.utils.user_module import load_user_module
from tests.unit.algorithms.batches import make_advantage_inputs, with_choice

ESTIMATOR = """
import torch
from alphaapollo.algorithms.advantages import Advantages, register_estimator

@register_estimator("{name}")
def mine(inputs, config):
    a = inputs.scores.unsqueeze(1) * inputs.mask
    {body}
"""
LOSS = """
import torch
from alphaapollo.algorithms.policy_losses import PolicyLossOutput, register_policy_loss

@register_policy_loss("{name}")
def mine(inputs, config):
    loss = -inputs.logp * inputs.advantages
    {body}
"""
numbers = iter(range(100))


def registered(folder: Path, text: str, body: str) -> tuple[str, Path]:
    name = f"tried_{next(numbers)}"
    path = folder / f"{name}.py"
    path.write_text(text.format(name=name, body=body))
    load_user_module(str(path), "algorithm.custom_module")
    return name, path


INPUTS = make_advantage_inputs(
    [0.0, 1.0, 0.0, 1.0],
    [0, 0, 1, 1],
    torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
)


def loss_inputs(advantage: float = 1.0) -> PolicyLossInputs:
    logp = torch.tensor([[-0.5, -1.0, -1.5], [-1.0, -0.5, 0.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    old = logp.detach() - 0.1
    return PolicyLossInputs(logp, old, advantage * mask * torch.tensor([[1.0], [-1.0]]), mask, rollout_logp=old - 0.1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", "failed: AttributeError"),
        ("return a", "failed: AttributeError"),
        ("return Advantages(a, None)", "the returns must be .*got NoneType"),
        ("return Advantages(a.long(), a)", r"the advantages must be .*torch\.int64"),
        ("return Advantages(a[:, 0], a)", r"the advantages must be .*\(4, 3\), .*\(4,\)"),
        ("return Advantages(a / 0, a)", "the advantages must be finite"),
        ("return Advantages(a + 1, a)", "must be zero outside the action mask"),
        ("return Advantages(a @ a, a)", r"RuntimeError: .*tried_\d+\.py, line 8: return Advantages\(a @ a, a\)"),
        ("return Advantages(a * inputs.groups, a)", r"'groups' .*mask, scores, group_ids,"),
        ("return Advantages(a - inputs.values, a)", "failed: TypeError"),  # which it has not asked for
    ],
)
def test_faulty_estimator_is_reported_with_its_file(tmp_path: Path, body: str, says: str) -> None:
    name, path = registered(tmp_path, ESTIMATOR, body)
    with pytest.raises(ValueError, match=says) as error:
        get_estimator(name)(INPUTS, Algorithm())
    assert str(error.value).startswith(f"{path}: ") and repr(name) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return loss", "failed: AttributeError"),
        ("return PolicyLossOutput(loss.mean())", r"the loss .*\(2, 3\), but got .*\(\)"),
        ("return PolicyLossOutput(loss.detach())", "the loss has no gradient"),
        ("return PolicyLossOutput(loss, {'x': 1.0})", "the metric 'x' must be .*got float"),
        ("raise KeyError('temperature')", "failed: KeyError: 'temperature'"),
    ],
)
def test_faulty_loss_is_reported_with_its_file(tmp_path: Path, body: str, says: str) -> None:
    name, path = registered(tmp_path, LOSS, body)
    with pytest.raises(ValueError, match=says) as error:
        get_policy_loss(name)(loss_inputs(), Actor())
    assert str(error.value).startswith(f"{path}: ") and repr(name) in str(error.value)


def test_errors_of_the_project_itself_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.adv_estimator=maxrl needs"):
        get_estimator("maxrl")(make_advantage_inputs([-1.0, 1.0], [0, 0]), Algorithm())


@pytest.mark.parametrize("name", policy_loss_names())
def test_losses_declare_whether_tokens_without_advantage_have_a_gradient(name: str) -> None:
    loss = get_policy_loss(name)
    if loss.fn.__module__.startswith("alphaapollo."):
        inputs = with_choice(loss_inputs(advantage=0.0), loss, Actor())
        (gradient,) = torch.autograd.grad(loss(inputs, Actor()).loss.sum(), inputs.logp, materialize_grads=True)
        assert loss.zero_without_advantage == (not gradient.any())


def test_valid_functions_pass(tmp_path: Path) -> None:
    estimator, _ = registered(tmp_path, ESTIMATOR, "return Advantages(a, a)")
    get_estimator(estimator)(INPUTS, Algorithm())
    loss, _ = registered(tmp_path, LOSS, "return PolicyLossOutput(loss, {'x': loss.detach().sum()})")
    assert not get_policy_loss(loss).zero_without_advantage  # unless it declares it
    get_policy_loss(loss)(loss_inputs(), Actor())
