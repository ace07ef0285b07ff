"""Evaluation suites of an installed package: each failure has a reason and no score."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaapollo.rollout.suites import ModelServer, SuiteResult, SuiteScore, make_suites, read_suite_results, run_suite
from alphaapollo.utils import plugins
from tests.maze_lab.install import install_maze_lab
from tests.mock_judge import MockJudge


@pytest.fixture(autouse=True)
def maze_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(install_maze_lab(tmp_path / "site"))
    for cached in (plugins._read_entry_points, plugins._list_plugins):
        cached.cache_clear()
    yield
    for cached in (plugins._read_entry_points, plugins._list_plugins):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("texts", "fact"),
    [
        (["gsm8k"], "'gsm8k' is no evaluation suite. Write .*maze:TASK"),
        (["maze:five"], "five is not a number"),
        (["maze:5", "maze:6", "maze:5"], "two suites are named 5"),
    ],
)
def test_suites_that_cannot_run_are_refused(texts: list[str], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        make_suites(texts)


def run(text: str, folder: Path, judge: MockJudge, timeout: float = 60.0) -> SuiteResult:
    (suite,) = make_suites([text], timeout=timeout)
    server = ModelServer(judge.url, "key", "policy", "models/tiny", 512)
    suite = pickle.loads(pickle.dumps(suite))  # as in a rollout worker
    result = asyncio.run(run_suite(suite, server, folder / "suites/step_3" / suite.name))
    assert read_suite_results(folder) == [result]
    return result


def test_scores_and_failures_are_results(tmp_path: Path) -> None:
    with MockJudge(lambda text: ">>>>>").serve() as judge:
        assert run("maze:5", tmp_path / "a", judge).scores == [SuiteScore("maze", "walked", 1.0, None, 1)]
        result = run("maze:6", tmp_path / "b", judge)
        assert result.metrics == {"val/suite/maze/walked": 0.0, "val/suite/6/failed": 0.0} and not result.error
    with MockJudge(lambda text: 400).serve() as judge:
        result = run("maze:5", tmp_path / "c", judge)
        assert result.metrics == {"val/suite/5/failed": 1.0} and "BadRequestError: " in result.error
    with MockJudge(lambda text: ">", latency=20.0).serve() as judge:
        assert "it did not end within 0.5 s" in run("maze:5", tmp_path / "d", judge, timeout=0.5).error
