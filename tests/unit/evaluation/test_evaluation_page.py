"""docs/evaluation.md names only existing commands, keys and metrics."""

import re
from pathlib import Path

import pytest

from alphaapollo.algorithms.accuracy_estimates import RESAMPLES
from alphaapollo.config.keys import COMMANDS, list_keys
from alphaapollo.config.schema import Config, EvalConfig, GenerationConfig, SftConfig
from alphaapollo.evaluation.metrics import compute_metrics_per_problem
from alphaapollo.evaluation.report import FIELDS
from alphaapollo.evaluation.scoring import RESPONSES

PAGE = Path(__file__).parents[3] / "docs" / "evaluation.md"
if not PAGE.exists():
    pytest.skip("an installed package has no docs folder", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_commands_work() -> None:
    commands = re.findall(r"python -m alphaapollo\.trainer\.(\w+)((?:[^\n]*\\\n)*[^\n]*)", TEXT)
    assert {name for name, _ in commands} == {"main_generation", "main_eval", "main_ppo"}
    for name, words in commands:
        keys = re.findall(r"([\w.]+)=", words)
        assert keys and set(keys) <= list_keys(COMMANDS[name]).keys()


def test_the_keys_exist() -> None:
    known = {key for schema in (Config, GenerationConfig, EvalConfig, SftConfig) for key in list_keys(schema)}
    named = re.findall(
        r"`((?:data|model|rollout|trainer|reward|env|custom_reward_function|actor_rollout_ref)\.[\w.]+)", TEXT
    )
    assert len(named) > 10 and [key for key in named if key not in known | {"reward_model.ground_truth"}] == []


def test_the_figures_are_those_of_the_table() -> None:
    table = re.findall(r"^\| `([\w@]+)`", TEXT, re.MULTILINE)
    assert {"avg@n", "pass@k", "maj@n", "reward", "response_length"} <= set(table)
    names = {re.sub(r"@\d+", "@", name) for name in compute_metrics_per_problem([], 3)[0]}
    assert names == {re.sub(r"@\w", "@", name) for name in table if "@" in name or name in names}
    assert ", ".join(FIELDS) in TEXT and f"{RESAMPLES:,}" in TEXT
    assert all(f"`{name}`" in TEXT for name in RESPONSES)
