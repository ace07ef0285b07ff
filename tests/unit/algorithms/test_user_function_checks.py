"""User functions that return invalid results are refused before the start, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.algorithms.advantages import estimator_names, get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss, policy_loss_names
from alphaapollo.algorithms.user_function_checks import (
    check_user_estimator,
    check_user_policy_loss,
    has_gradient_without_advantages,
    make_toy_advantage_inputs,
    make_toy_loss_inputs,
)
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.utils.user_module import load_user_module

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


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", "return Advantages, but returned NoneType"),
        ("return a", "return Advantages, but returned Tensor"),
        ("return Advantages(a, None)", "the returns of .*tensor, but is NoneType"),
        ("return Advantages(a.long(), a)", r"the advantages of .*floating point, .*torch\.int64"),
        ("return Advantages(a[:, 0], a)", r"the advantages of .*\(4, 3\), but has \(4,\)"),
        ("return Advantages(a / 0, a)", "the advantages of .* must be finite"),
        ("return Advantages(a + 1, a)", "must be zero outside the action mask"),
        ("return Advantages(a @ a, a)", r"RuntimeError: .*tried_\d+\.py, line 8: return Advantages\(a @ a, a\)"),
        ("return Advantages(a * inputs.groups, a)", r"'groups' .*mask, scores, group_ids,"),
        ("return Advantages(a - inputs.values, a)", "raised TypeError"),  # which it has not asked for
    ],
)
def test_faulty_estimator_is_reported_with_its_file(tmp_path: Path, body: str, says: str) -> None:
    name, path = registered(tmp_path, ESTIMATOR, body)
    with pytest.raises(ValueError, match=says) as error:
        check_user_estimator(get_estimator(name), Algorithm(), 2, [])
    assert str(error.value).startswith(f"{path}: ") and repr(name) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return loss", "return PolicyLossOutput, but returned Tensor"),
        ("return PolicyLossOutput(loss.mean())", r"the loss of .*\(2, 3\), but has \(\)"),
        ("return PolicyLossOutput(loss.detach())", "its loss has no gradient"),
        ("return PolicyLossOutput(loss / 0)", "its loss must be finite"),
        ("return PolicyLossOutput(loss, {'x': 1.0})", "metric 'x' of .*tensor, but is float"),
        ("raise KeyError('temperature')", "raised KeyError: 'temperature'"),
    ],
)
def test_faulty_loss_is_reported_with_its_file(tmp_path: Path, body: str, says: str) -> None:
    name, path = registered(tmp_path, LOSS, body)
    with pytest.raises(ValueError, match=says) as error:
        check_user_policy_loss(get_policy_loss(name), Actor())
    assert str(error.value).startswith(f"{path}: ") and repr(name) in str(error.value)


def test_rows_without_advantage_are_kept_for_user_losses(tmp_path: Path) -> None:
    assert not has_gradient_without_advantages(get_policy_loss("ppo"), Actor())
    assert has_gradient_without_advantages(get_policy_loss("kl_cov"), Actor())
    body = "return PolicyLossOutput(loss + torch.relu(-3 - inputs.logp))"  # the term is 0 on the toy inputs
    threshold, _ = registered(tmp_path, LOSS, body)
    assert has_gradient_without_advantages(get_policy_loss(threshold), Actor())


def test_valid_functions_pass(tmp_path: Path) -> None:
    estimator, _ = registered(tmp_path, ESTIMATOR, "return Advantages(a, a)")
    check_user_estimator(get_estimator(estimator), Algorithm(), 1, [])
    loss, _ = registered(tmp_path, LOSS, "return PolicyLossOutput(loss, {'x': loss.detach().sum()})")
    check_user_policy_loss(get_policy_loss(loss), Actor())
    garbage_off_the_mask, _ = registered(tmp_path, LOSS, "return PolicyLossOutput(loss / inputs.mask)")
    check_user_policy_loss(get_policy_loss(garbage_off_the_mask), Actor())


def test_toy_inputs_are_valid_for_all_builtin_functions() -> None:
    inputs = make_toy_advantage_inputs(4, [])
    for estimator in map(get_estimator, estimator_names()):
        if estimator.fn.__module__.startswith("alphaapollo."):
            estimator(inputs, Algorithm())
    for loss in map(get_policy_loss, policy_loss_names()):
        if loss.fn.__module__.startswith("alphaapollo."):
            assert loss(make_toy_loss_inputs(loss, Actor()), Actor()).loss.requires_grad
