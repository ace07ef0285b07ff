"""docs/evaluation.md has all metrics. tests/unit/test_docs.py checks its keys."""

import re
from pathlib import Path

import pytest

from alphaapollo.observability.estimates import RESAMPLES
from alphaapollo.observability.sample_metrics import compute_metrics_per_problem
from alphaapollo.trainer.evaluation.report import CSV_COLUMNS
from alphaapollo.trainer.evaluation.scoring import RESPONSE_COLUMNS

PAGE = Path(__file__).parents[4] / "docs" / "evaluation.md"
if not PAGE.exists():
    pytest.skip("an installed package has no docs folder", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_table() -> None:
    table = re.findall(r"^\| `([\w@]+)`", TEXT, re.MULTILINE)
    assert {"avg@n", "pass@k", "maj@n", "reward", "response_length"} <= set(table)
    names = {re.sub(r"@\d+", "@", name) for name in compute_metrics_per_problem([], 3)[0]}
    assert names == {re.sub(r"@\w", "@", name) for name in table if "@" in name or name in names}
    assert ", ".join(CSV_COLUMNS) in TEXT and f"{RESAMPLES:,}" in TEXT
    assert all(f"`{name}`" in TEXT for name in RESPONSE_COLUMNS)
