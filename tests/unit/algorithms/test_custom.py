import re
import textwrap
from pathlib import Path

import pytest
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, get_estimator
from alphaapollo.algorithms.custom import load_custom_module
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss
from alphaapollo.config.schema import Actor, Algorithm

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


def test_a_users_module_registers_what_it_defines(tmp_path: Path):
    path = write(tmp_path, MODULE.format(name="mine"))
    assert load_custom_module(path) is load_custom_module(path)
    one = torch.ones(1, 2)
    inputs = AdvantageInputs(one, one, torch.tensor([3.0]), torch.tensor([0]), torch.tensor([0]))
    assert get_estimator("mine")(inputs, Algorithm()).advantages.tolist() == [[6.0, 6.0]]
    assert get_policy_loss("mine")(PolicyLossInputs(-one, -one, one, one), Actor()).loss.tolist() == [[1.0, 1.0]]


def test_the_example_of_the_docs_runs_from_a_file_outside_the_package(tmp_path: Path):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 15
    load_custom_module(write(tmp_path, example, "example.py"))
    mask, ids = torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1])
    inputs = AdvantageInputs(torch.zeros(2, 2), mask, torch.tensor([3.0, 1.0]), ids, ids)
    assert get_estimator("centred")(inputs, Algorithm()).advantages.tolist() == [[1.0, 1.0], [-1.0, 0.0]]  # mean 2
    logp = torch.tensor([[-2.0, -3.0]])
    losses = PolicyLossInputs(logp, logp, torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))
    assert get_policy_loss("plain")(losses, Actor()).loss.tolist() == [[2.0, 6.0]]


@pytest.mark.parametrize("path", ["missing.py", "", "."])
def test_no_such_file(tmp_path: Path, path: str):
    with pytest.raises(ValueError, match=r"is not a Python file; give the path of a \.py file"):
        load_custom_module(str(tmp_path / path) if path else "")


def test_not_python(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a Python file"):
        load_custom_module(write(tmp_path, "", "notes.txt"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nowhere_to_be_found", r"ModuleNotFoundError: .*bad\.py, line 1: import nowhere_to_be_found\)"),
        ("x = 1\n1 / 0", r"ZeroDivisionError: division by zero \(.*bad\.py, line 2: 1 / 0\)"),
        ("def broken(:", r"SyntaxError: .*bad\.py, line 1\)"),
    ],
)
def test_a_module_that_fails(tmp_path: Path, text: str, says: str):
    path = write(tmp_path, text, "bad.py")
    for _ in range(2):  # a failed module is not taken for a loaded one
        with pytest.raises(ValueError, match=f"fails while imported: {says}"):
            load_custom_module(path)


def test_a_taken_name(tmp_path: Path):
    with pytest.raises(ValueError, match="'grpo' is registered twice"):
        load_custom_module(write(tmp_path, MODULE.format(name="grpo"), "taken.py"))
