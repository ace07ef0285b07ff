from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.check import FUNCTIONS, TOLERANCES, check_item, main

VECTORS = [Path(__file__).with_name(name) for name in ("vectors.json", "vectors_2026.json")]
ITEMS = [item for path in VECTORS for item in json.loads(path.read_text(encoding="utf-8"))["items"]]


def write(folder: Path, *items: dict) -> str:
    path = folder / "items.json"
    path.write_text(json.dumps({"items": items}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
@pytest.mark.parametrize("number", range(len(ITEMS)), ids=lambda n: f"{n}-{ITEMS[n]['function']}")
def test_item(number: int, dtype: str):
    problems, _ = check_item(ITEMS[number], TOLERANCES[dtype])
    assert not problems


def test_the_vectors_cover_all_functions():
    assert {item["function"] for item in ITEMS} == set(FUNCTIONS)


def test_command_prints_one_line_per_function_and_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fixed = {"function": "kl_fixed", "params": {"coef": 0.5}, "inputs": {"kls": [1.0]}, "expected": {"value": [0.5]}}
    assert main([write(tmp_path, fixed)]) == 0
    header, line, total = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["function", "checked", "failed", "unsupported"]
    assert line.split() == ["kl_fixed", "1", "0", "0", "0.0e+00"]
    assert total.split() == ["total", "1", "0", "0"]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"expected": {"value": [[0.0, 1.0 + 1e-8], [0.0, 0.0]]}}, "failed"),  # beyond rtol
        ({"expected": {"value": [0.0, 1.0]}}, "failed"),  # wrong shape
        ({"inputs": {"scores": [1.0], "mask": [[1, 1], [1, 1]]}}, "failed"),  # shapes that do not match
        ({"function": "place_reward"}, "unsupported"),
        ({"params": {"where": "last"}}, "unsupported"),
        ({"expected": {"rewards": [[0.0, 1.0]]}}, "unsupported"),
    ],
)
def test_command_exits_1_and_names_the_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict, verdict: str
):
    good = {
        "function": "place_outcome_reward",
        "params": {},
        "inputs": {"scores": [1.0, 2.0], "mask": [[1, 1], [0, 0]]},
        "expected": {"value": [[0.0, 1.0], [0.0, 0.0]]},
    }
    assert main([write(tmp_path, good)]) == 0
    assert main([write(tmp_path, {**good, **change})]) == 1
    assert f"{verdict}: item 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "parameter"),
    [("rloo", "singleton"), ("gae", "offmask"), ("aggregate", "mode"), ("kl_loss", "kind"), ("dpo", "loss_type")],
)
def test_an_unknown_choice_is_unsupported(tmp_path: Path, function: str, parameter: str):
    item = next(item for item in ITEMS if item["function"] == function)
    assert main([write(tmp_path, {**item, "params": {**item["params"], parameter: "another"}})]) == 1


def test_a_wrong_gradient_fails(tmp_path: Path):
    item = next(item for item in ITEMS if item["function"] == "policy_gradient")
    wrong = [[2 * value for value in row] for row in item["expected"]["grad"]]
    assert main([write(tmp_path, {**item, "expected": {"grad": wrong}})]) == 1
