"""alphaapollo.testing checks functions of users, and the template of a package (examples/algorithm_package)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.algorithms.advantages import base as estimators
from alphaapollo.algorithms.advantages import estimator_names, get_estimator, register_estimator
from alphaapollo.algorithms.policy_losses import (
    PolicyLossOutput,
    get_policy_loss,
    policy_loss_names,
    register_policy_loss,
)
from alphaapollo.algorithms.policy_losses import base as losses
from alphaapollo.config.check import _find_path_error
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.config.schema.base import CODE
from alphaapollo.runs.input_digests import _list_code_files
from alphaapollo.testing import check_estimator, check_policy_loss, try_user_functions
from alphaapollo.utils import plugins
from alphaapollo.utils.user_module import load_user_module

TEMPLATE = Path(__file__).parents[2] / "examples" / "algorithm_package"
STOP_GRADIENTS = {"cispo", "gspo_token", "vespo"}


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test registers and imports."""
    for registry in (estimators._estimators, losses._policy_losses):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylab"]:
        del sys.modules[name]
    plugins._read_entry_points.cache_clear()
    plugins._list_plugins.cache_clear()


@pytest.mark.parametrize("name", estimator_names())
def test_estimators_of_the_project_pass(name: str) -> None:
    check_estimator(name)


@pytest.mark.parametrize("name", policy_loss_names())
def test_losses_of_the_project_pass(name: str) -> None:
    check_policy_loss(name, stops_gradient=name in STOP_GRADIENTS)


def depends_on_order(inputs: Any, config: Any) -> Any:
    return estimators.Advantages(*[torch.arange(len(inputs.mask))[:, None] * inputs.mask] * 2)


def depends_on_padding(inputs: Any, config: Any) -> Any:
    return PolicyLossOutput(inputs.logp * inputs.logp.shape[1])


def depends_on_other_rows(inputs: Any, config: Any) -> Any:
    return PolicyLossOutput(inputs.logp * inputs.mask.sum())


def has_a_hidden_gradient(inputs: Any, config: Any) -> Any:
    return PolicyLossOutput(inputs.logp * inputs.logp.detach())


def averages_a_metric(inputs: Any, config: Any) -> Any:
    return PolicyLossOutput(inputs.logp, {"kl": inputs.logp.mean()})


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (depends_on_order, "order"),
        (depends_on_padding, "padding"),
        (depends_on_other_rows, "row 0 alone"),
        (has_a_hidden_gradient, "gradient at row 0"),
        (averages_a_metric, "metric 'kl', added up"),
    ],
)
def test_faults_are_found(function: Callable[..., Any], what: str) -> None:
    register, check = (
        (register_estimator, check_estimator) if "order" in what else (register_policy_loss, check_policy_loss)
    )
    register("faulty")(function)
    with pytest.raises(AssertionError, match=what):
        check("faulty")


def with_metrics(*names: Any, value: float = 0.0) -> Callable[..., Any]:
    return lambda inputs, config: PolicyLossOutput(inputs.logp, dict.fromkeys(names, torch.tensor(value)))


@pytest.mark.parametrize(
    ("kind", "function", "error"),
    [
        ("loss", lambda inputs, config: PolicyLossOutput(inputs.logp / 0.0), "'faulty'.*the loss is not finite"),
        (
            "loss",
            lambda inputs, config: PolicyLossOutput(inputs.logp * inputs.advantages.mul_(2)),
            "changes its inputs",
        ),
        ("loss", with_metrics("share", value=math.nan), "the metric 'share' is not finite"),
        ("loss", with_metrics("old_policy_kl"), "cannot have the name 'old_policy_kl'"),
        ("loss", with_metrics(3), "cannot have the name 3"),
        ("loss", lambda inputs, config: with_metrics(*["x"] * len(inputs.mask[1:]))(inputs, config), "other names"),
        ("selector", lambda logp, advantages, config: logp, r"select_tokens of .*must return bool \[20\]"),
        ("estimator", lambda inputs, config: estimators.Advantages(*[inputs.scores] * 2), r"test_testing\.py.*shape"),
        ("estimator", lambda inputs, config: estimators.Advantages(*[-inputs.values] * 2), "NoneType"),  # no `needs`
    ],
)
def test_a_faulty_function_is_refused_before_workers_start(kind: str, function: Callable[..., Any], error: str) -> None:
    if kind == "estimator":
        register_estimator("faulty")(function)
    else:
        selector = function if kind == "selector" else None
        register_policy_loss("faulty", select_tokens=selector)(with_metrics() if selector else function)
    loss = get_policy_loss("ppo" if kind == "estimator" else "faulty")
    estimator = get_estimator("faulty" if kind == "estimator" else "grpo")
    with pytest.raises(ValueError, match=error):
        try_user_functions(estimator, loss, Algorithm(), Actor(), samples=4)


def test_the_template_is_found_by_its_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "[alphaapollo.estimators]\nmidrange = mylab.algorithms:midrange\nother = mylab.algorithms:midrange\n"
    points += "[alphaapollo.losses]\nsquared = mylab.algorithms:squared\n"
    (tmp_path / "mylab-0.1.dist-info").mkdir()
    (tmp_path / "mylab-0.1.dist-info/METADATA").write_text("Name: mylab\nVersion: 0.1\n")
    (tmp_path / "mylab-0.1.dist-info/entry_points.txt").write_text(points)
    assert all(line in (TEMPLATE / "pyproject.toml").read_text() for line in ('midrange = "mylab', 'squared = "mylab'))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(TEMPLATE))
    plugins._read_entry_points.cache_clear()
    plugins._list_plugins.cache_clear()
    module = load_user_module(str(TEMPLATE / "test_mylab.py"), "test")
    for test in [value for name, value in vars(module).items() if name.startswith("test_")]:
        test()
    with pytest.raises(ValueError, match=r"mylab 0\.1 adds the advantage estimator 'other'.*does not register"):
        get_estimator("other")
    with pytest.raises(ValueError, match=r"'midrangg'.*'midrange'"):
        get_estimator("midrangg")
    (tmp_path / "mylab-0.1.dist-info/entry_points.txt").write_text(f"{points}ppo = mylab.algorithms:squared\n")
    plugins._read_entry_points.cache_clear()
    plugins._list_plugins.cache_clear()
    with pytest.raises(ValueError, match=r"mylab 0\.1 adds ppo .*a name that alphaapollo uses"):
        get_policy_loss("ppo")
    # Without entry points, the module's name is enough.
    assert load_user_module("mylab.algorithms", "algorithm.custom_module").squared
    assert _find_path_error(CODE, "mylab.algorithms") == "" != _find_path_error(CODE, "mylab.nothing")
    assert {file.name for file in _list_code_files("mylab.algorithms")} == {"__init__.py", "algorithms.py"}
