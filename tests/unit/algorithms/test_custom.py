"""Estimators and losses of users: registration, and errors in one line that name the file, function and problem."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.algorithms.advantages import get_estimator, register_estimator
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss, policy_loss_names
from alphaapollo.algorithms.preference_losses import get_preference_loss
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.utils.user_module import load_user_module
from tests.unit.algorithms.batches import make_advantage_inputs, with_choice

PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms" / "custom.md"
KEY = "algorithm.custom_module"
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
numbers = count()


def write(folder: Path, text: str, name: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def register(folder: Path, text: str, body: str) -> tuple[str, str]:
    """Return the name of the function, and its file."""
    name = f"tried_{next(numbers)}"
    path = write(folder, text.format(name=name, body=body), name)
    assert load_user_module(path, KEY) is load_user_module(path, KEY)
    return name, path


MASK = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
INPUTS = make_advantage_inputs([0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], MASK)


def loss_inputs(advantage: float = 1.0) -> PolicyLossInputs:
    logp = torch.tensor([[-0.5, -1.0, -1.5], [-1.0, -0.5, 0.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    old = logp.detach() - 0.1
    return PolicyLossInputs(logp, old, advantage * mask * torch.tensor([[1.0], [-1.0]]), mask, rollout_logp=old - 0.1)


def test_valid_functions_pass(tmp_path: Path) -> None:
    estimator, _ = register(tmp_path, ESTIMATOR, "return Advantages(2 * a, a)")
    result = get_estimator(estimator)(INPUTS, Algorithm())
    assert result.advantages.tolist() == [[0.0] * 3, [2.0, 2.0, 0.0], [0.0] * 3, [2.0, 0.0, 0.0]]
    loss, _ = register(tmp_path, LOSS, "return PolicyLossOutput(loss, {'x': loss.detach().sum()})")
    assert not get_policy_loss(loss).zero_without_advantage  # unless it declares it
    assert get_policy_loss(loss)(loss_inputs(), Actor()).loss.tolist() == [[0.5, 1.0, 1.5], [-1.0, -0.5, 0.0]]


def test_a_function_can_take_single_fields_of_inputs_and_config() -> None:
    def scaled(scores: torch.Tensor, gamma: float) -> torch.Tensor:
        return gamma * scores

    name = f"tried_{next(numbers)}"
    assert register_estimator(name, "scores", "gamma", scope="trajectories")(scaled) is scaled
    assert get_estimator(name).reads == ("gamma",)
    result = get_estimator(name)(INPUTS, Algorithm(gamma=0.5))
    assert result.advantages.tolist() == [[0.0] * 3, [0.5, 0.5, 0.0], [0.0] * 3, [0.5, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("text", "body", "says"),
    [
        (ESTIMATOR, "pass", "must return Advantages, but returned NoneType"),
        (ESTIMATOR, "return a", "must return Advantages, but returned Tensor"),
        (ESTIMATOR, "return Advantages(a, None)", "the returns must be .*got NoneType"),
        (ESTIMATOR, "return Advantages(a.long(), a)", r"the advantages must be .*torch\.int64"),
        (ESTIMATOR, "return Advantages(a[:, 0], a)", r"the advantages must be .*\(4, 3\), .*\(4,\)"),
        (ESTIMATOR, "return Advantages(a / 0, a)", "the advantages must be finite"),
        (ESTIMATOR, "return Advantages(a + 1, a)", "must be zero outside the action mask"),
        (ESTIMATOR, "return Advantages(a @ a, a)", r"RuntimeError: .*tried_\d+\.py, line 8: return Advantages\(a @ a"),
        (ESTIMATOR, "return Advantages(a * inputs.groups, a)", r"'groups' .*mask, scores, group_ids,"),
        (ESTIMATOR, "return Advantages(a - inputs.values, a)", "failed: TypeError"),  # which it has not asked for
        (LOSS, "return loss", "must return PolicyLossOutput, but returned Tensor"),
        (LOSS, "return PolicyLossOutput(loss.mean())", r"the loss .*level=token.*\(2, 3\), but got .*\(\)"),
        (LOSS, "return PolicyLossOutput(loss.detach())", "the loss has no gradient"),
        (LOSS, "return PolicyLossOutput(loss, {'x': 1.0})", "the metric 'x' must be .*got float"),
        (LOSS, "raise KeyError('temperature')", "failed: KeyError: 'temperature'"),
    ],
)
def test_faulty_function_is_reported_with_its_file(tmp_path: Path, text: str, body: str, says: str) -> None:
    name, path = register(tmp_path, text, body)
    with pytest.raises(ValueError, match=says) as error:
        if text is ESTIMATOR:
            get_estimator(name)(INPUTS, Algorithm())
        else:
            get_policy_loss(name)(loss_inputs(), Actor())
    assert str(error.value).startswith(f"{path}: ") and repr(name) in str(error.value)
    assert "\n" not in str(error.value)


def test_errors_of_the_project_itself_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.adv_estimator=maxrl needs rewards of at least 0, but got -1"):
        get_estimator("maxrl")(make_advantage_inputs([-1.0, 1.0], [0, 0]), Algorithm())


@pytest.mark.parametrize("name", policy_loss_names())
def test_losses_declare_whether_tokens_without_advantage_have_a_gradient(name: str) -> None:
    loss = get_policy_loss(name)
    if loss.fn.__module__.startswith("alphaapollo."):
        inputs = with_choice(loss_inputs(advantage=0.0), loss, Actor())
        output = loss(inputs, Actor())
        losses = output.loss + output.penalty
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.logp, materialize_grads=True)
        assert loss.zero_without_advantage == (not gradient.any())


def test_the_example_of_the_docs_runs_from_a_file_outside_the_package(tmp_path: Path) -> None:
    texts = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(texts[0].splitlines()) <= 15
    names = ("example", "tests_of_the_page", "second")
    modules = [load_user_module(write(tmp_path, *one), KEY) for one in zip(texts, names, strict=True)]
    modules[1].test_mine()
    inputs = make_advantage_inputs([3.0, 1.0], [0, 1], torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    for name in ("centred", "centred_scores"):
        assert get_estimator(name)(inputs, Algorithm()).advantages.tolist() == [[1.0, 1.0], [-1.0, 0.0]]  # mean 2
    logp = torch.tensor([[-2.0, -3.0]])
    losses = PolicyLossInputs(logp, logp, torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))
    assert get_policy_loss("plain")(losses, Actor()).loss.tolist() == [[2.0, 6.0]]


def test_a_taken_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'grpo' is registered twice"):
        load_user_module(write(tmp_path, ESTIMATOR.format(name="grpo", body="pass"), "taken"), KEY)


@pytest.mark.parametrize(
    ("get", "name", "similar"),
    [(get_estimator, "gpro", "grpo"), (get_policy_loss, "gsop", "gspo"), (get_preference_loss, "ipoo", "ipo")],
)
def test_unknown_names_suggest_similar_ones(get: Callable[[str], Any], name: str, similar: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*'{similar}'"):
        get(name)
