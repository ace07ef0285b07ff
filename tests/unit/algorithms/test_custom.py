import re
import textwrap
from pathlib import Path

import pytest
import torch

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.utils.user_module import load_user_module
from tests.unit.algorithms.batches import make_advantage_inputs

PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms" / "custom.md"

MODULE = """
from alphaapollo.algorithms.advantages import Advantages, register_estimator
from alphaapollo.algorithms.policy_losses import PolicyLossOutput, register_policy_loss

@register_estimator("{name}", group=True)
def double(inputs, config):
    advantages = 2 * inputs.scores.unsqueeze(1) * inputs.mask
    return Advantages(advantages, advantages)

@register_policy_loss("{name}")
def plain(inputs, config):
    return PolicyLossOutput(-inputs.logp * inputs.advantages)
"""


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def test_user_module_is_imported_and_registers_its_functions(tmp_path: Path):
    path = write(tmp_path, MODULE.format(name="mine"))
    assert load_user_module(path, "algorithm.custom_module") is load_user_module(path, "algorithm.custom_module")
    one = torch.ones(1, 2)
    assert get_estimator("mine")(make_advantage_inputs([3.0], [0], one), Algorithm()).advantages.tolist() == [
        [6.0, 6.0]
    ]
    assert get_policy_loss("mine")(PolicyLossInputs(-one, -one, one, one), Actor()).loss.tolist() == [[1.0, 1.0]]


def test_the_example_of_the_docs_runs_from_a_file_outside_the_package(tmp_path: Path):
    example, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 15
    load_user_module(write(tmp_path, example, "example.py"), "algorithm.custom_module")
    inputs = make_advantage_inputs([3.0, 1.0], [0, 1], torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    load_user_module(write(tmp_path, second, "second.py"), "algorithm.custom_module")
    for name in ("centred", "centred_scores"):
        assert get_estimator(name)(inputs, Algorithm()).advantages.tolist() == [[1.0, 1.0], [-1.0, 0.0]]  # mean 2
    logp = torch.tensor([[-2.0, -3.0]])
    losses = PolicyLossInputs(logp, logp, torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))
    assert get_policy_loss("plain")(losses, Actor()).loss.tolist() == [[2.0, 6.0]]


def test_a_taken_name(tmp_path: Path):
    with pytest.raises(ValueError, match="'grpo' is registered twice"):
        load_user_module(write(tmp_path, MODULE.format(name="grpo"), "taken.py"), "algorithm.custom_module")
