"""The viewer shows loops of one's own like the runs of commands."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
from starlette.testclient import TestClient

from alphaapollo import Trainer
from alphaapollo.plugins.viewer.app import make_app
from alphaapollo.plugins.viewer.run_folders import find_kind, read_run_state
from tests.loop.conftest import Task
from tests.loop.own_loop_kit import count_digits
from tests.plugins.viewer.run_kit import update_index


@pytest.fixture(autouse=True)
def keep_warm_process() -> Iterator[None]:
    """A trainer stops the fork server of its process when it ends. Later tests need the warm process."""
    with mock.patch.object(forkserver, "_forkserver", forkserver.ForkServer()):
        yield


def test_the_viewer_shows_an_own_loop(task: Task, tmp_path: Path) -> None:
    words = ("rollout.name=hf", "data.max_response_length=8", "trainer.cpu_threads=1", f"trainer.output_dir={tmp_path}")
    with Trainer({"model.path": task.model}, *words) as t:
        for step in (1, 2):
            t.log(step, t.sample(["3+4=?"], n=2, reward=count_digits))
        assert read_run_state(t.folder).name == "running"
    page = TestClient(make_app(update_index(tmp_path), ["testserver"])).get("/").text
    assert find_kind(t.folder) == "own loop"
    assert [text for text in ("own loop", "finished") if text not in page] == []
