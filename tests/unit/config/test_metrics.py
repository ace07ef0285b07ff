"""The catalogue of metrics: which entry a name has, and what programs read from it."""

from __future__ import annotations

import pytest

from alphaapollo.config.__main__ import explain_key
from alphaapollo.config.metrics import (
    describe_axis,
    find_metric,
    is_lower_better,
    list_end_metrics,
    list_headlines,
    list_metrics,
    load_catalogue,
)


@pytest.mark.parametrize(
    ("name", "entry", "is_lower"),
    [
        ("critic/score/mean", "critic/score/mean", False),
        ("val/accuracy_greedy", "val/accuracy<pass>", False),
        ("val/failed_greedy", "val/failed<pass>", True),
        ("val/gsm8k/failed", "val/<data source>/failed<pass>", True),
        ("val/gsm8k/accuracy", "val/<data source>/<metric><pass>", False),
        ("val/suite/gsm8k/exact_match/strict", "val/suite/<task>/<metric>", False),
        ("val/suite/wikitext/word_perplexity", "val/suite/<task>/<kind>_perplexity", True),
        ("val/loss/a.parquet", "val/loss/<file>", True),
        ("timing/step", "timing/step", True),
        ("timing/update", "timing/<phase>", True),
        ("distill/reverse_kl", "distill/reverse_kl", True),
        ("own/loss", None, True),
        ("own/value", None, False),
    ],
)
def test_the_entry_and_the_direction_of_a_name(name: str, entry: str | None, is_lower: bool) -> None:
    found = find_metric(name)
    assert (found.name if found else None, is_lower_better(name)) == (entry, is_lower)


def test_names_are_unique_and_programs_read_only_names_of_the_catalogue() -> None:
    names = [metric.name for metric in list_metrics()]
    assert len(names) == len({*names}) > 200
    catalogue = load_catalogue()
    main = [(name, metric.validation, metric.beside) for name, metric in catalogue.main.items()]
    read = {*sum(main, ()), *catalogue.costs, *(name for row in catalogue.console.values() for name in row)} - {""}
    assert [name for name in read if find_metric(name) is None] == []
    beginnings = {start for starts in catalogue.health.values() for start in starts} - {"speed/"}
    assert [start for start in beginnings if not any(name.startswith(start) for name in names)] == []
    assert all(
        "{" in text.format(0.5) or text.format(0.5) for row in catalogue.console.values() for text in row.values()
    )


def test_a_metric_is_explained_like_a_key() -> None:
    line = explain_key("response_length/clip_ratio")
    assert line.startswith(
        "response_length/clip_ratio: metric (share, lower is better; episodes that a token limit cut; "
    )
    assert "healthy: below 0.1; otherwise: raise data.max_response_length" in line and "`" not in line
    assert "accuracy (docs/reward_functions.md#accuracy)" in explain_key("reward/accuracy")
    assert "unknown metric" in explain_key("reward/acuracy") and "'reward/accuracy'" in explain_key("reward/acuracy")


def test_an_axis_has_what_its_metrics_share() -> None:
    assert describe_axis(["val/accuracy", "reward/accuracy"]) == "share, higher is better"
    assert describe_axis(["val/accuracy", "groups/all_wrong"]) == "share"
    assert describe_axis(["actor/entropy"]) == "nats per token" and describe_axis(["own/value"]) == ""


def test_the_metrics_of_a_run_and_of_its_end() -> None:
    assert ("reward/accuracy", "val/accuracy") in list_headlines()
    assert list_end_metrics()[0] == ["val/accuracy", "val/reward", "val/loss"]
