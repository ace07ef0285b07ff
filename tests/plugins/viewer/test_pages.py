"""Pages of the viewer: what they show, hostile content, and errors."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from alphaapollo.cli.main import main
from alphaapollo.plugins.viewer.app import make_app
from alphaapollo.processes.folder_lock import lock_folder
from alphaapollo.runs.command_history import record_in_history
from alphaapollo.runs.rollout_log import RolloutLog, TrainedRow
from alphaapollo.runs.run_status import RunStatus, write_run_status
from alphaapollo.types import Outcome, Score
from tests.plugins.viewer.run_kit import (
    HOSTILE,
    make_group,
    read_page,
    update_index,
    write_groups,
    write_run,
    write_suite_results,
)


@contextmanager
def serve(root: Path) -> Iterator[TestClient]:
    """Viewer of two runs in the folder `root`."""
    write_run(root / "first")
    write_run(root / "second", seed=1, text=HOSTILE)
    with TestClient(make_app(update_index(root), ["testserver"])) as client:
        yield client


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr("alphaapollo.plugins.viewer.sample_pages.SEARCH_SECONDS", 60.0)
    with serve(tmp_path / "outputs") as client:
        yield client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Viewer for tests that change neither runs nor notes."""
    with serve(tmp_path_factory.mktemp("viewer") / "outputs") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("/", ['href="/runs/2">second</a>', 'href="/runs/1">first</a>', "critic/score/mean</span> 0.300", "3 of 9"]),
        ("/?by=sweep", ['<th title="trainer.seed">', 'best" data-label="critic/score/mean">1.300</td>', ">1<"]),
        (
            "/runs/1",
            [
                "/curves?metric=critic/score/mean",
                ">reward, higher is better</small>",
                'href="/runs/1/step/3">step 3</a>',
            ],
        ),
        ("/runs/1", ["<dt>critic/score/mean</dt><dd>0.300<small>first 0.100</small>", "<dt>iterations</dt><dd>9</dd>"]),
        ("/runs/1", ["best sample", "&lt;think&gt;7, 7&lt;/think&gt;14", "worst sample"]),
        (
            "/runs/1",
            ["rows.jsonl</td><td>the column", '>not read</td><td class="n">3</td><td class="n">40<'],
        ),
        (
            "/runs/1",
            ["Planned memory of a GPU of 80 GiB", '<td class="n">2.50</td><td>kv cache 1.50, engine weights 1'],
        ),
        ("/runs/1/health", ["Groups: constant", "constant: groups/mixed = 0.500"]),
        ("/runs/1/step/2/1?with=step/2/0", ["<del>", "<ins>15</ins>"]),
        ("/compare?run=1&run=2", ["1 keys differ", "trainer.seed", '<td class="wide differs">1</td>']),
    ],
)
def test_facts_of_a_page_in_their_order(shared: TestClient, path: str, facts: list[str]) -> None:
    assert re.search(".*".join(map(re.escape, facts)), read_page(shared, path))


def test_filter_hidden_runs_and_notes(client: TestClient, tmp_path: Path) -> None:
    def list_names(query: str) -> list[str]:
        return sorted(re.findall(r'href="/runs/\d">(\w+)</a>', read_page(client, f"/?{query}")))

    assert client.put("/runs/1/notes", json={"tags": "good  lr", "note": HOSTILE}).status_code == 204
    assert list_names("text=GOOD") == ["first"] and list_names("text=good+second") == []
    page = read_page(client, "/runs/1")
    assert '<span class="tag">lr</span>' in page and "<script>document" not in page
    assert client.put("/runs/2/notes", json={"hidden": True}).status_code == 204
    assert list_names("") == ["first"] and list_names("hidden=1") == ["first", "second"]
    assert list_names("state=failed") == []
    assert client.put("/runs/1/notes", json={"path": "x"}).status_code == 400
    assert client.put("/runs/1/notes", content=b"[" * 100_000).status_code == 400
    assert client.put("/runs/9/notes", json={"tags": "x"}).status_code == 404
    assert client.post("/runs/1/notes", data={"tags": "from another page"}).status_code == 405


def test_page_of_a_run_shows_its_evaluation_suites(client: TestClient, tmp_path: Path) -> None:
    write_suite_results(tmp_path / "outputs/first")
    page = read_page(client, "/runs/1")
    cells = "<td>step_20</td><td>gsm8k</td><td>exact_match</td>"
    assert f'{cells}<td class="n">0.250</td><td class="n">0.125</td><td class="n">4</td>' in page
    assert "failed: it did not end within 9 s &lt;b&gt;" in page


def test_iteration_is_sorted_and_filtered(shared: TestClient) -> None:
    def list_samples(query: str) -> list[str]:
        return re.findall(r'data-src="/runs/1/step/2/(\d+)/conversation"', read_page(shared, f"/runs/1/step/2{query}"))

    assert list_samples("?prompt_id=17") == ["0", "1"] and list_samples("?prompt_id=18") == []
    for query, found in {
        "": "01",
        "&sort=reward": "10",
        "&sort=reward&down=1": "01",
        "&sort=advantage&down=1": "01",
        "&status=not+trained": "1",
        "&text=THINK": "0",
        "&where=reward&is=at+least&number=0.5": "0",
        "&where=advantage&is=at+most&number=0.4": "",
    }.items():
        assert list_samples(f"?view=samples{query}") == [*found], query
    page = read_page(shared, "/runs/1/step/2?view=samples")
    (first, second) = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in page.split("<tr>")[2:]]
    answer = "&lt;think&gt;7, 7&lt;/think&gt;14"
    cells = ["", "What is 7 + 7?", " 1", "trained", answer, "0.500", "3", "stop", "17.0"]
    assert [re.sub("<.*?>", "", cell) for cell in first] == cells
    assert "not trained" in second[3] and second[4] == "15" and second[5] == "-"


def test_rows_open_their_conversation_and_their_samples(shared: TestClient) -> None:
    page = read_page(shared, "/runs/1/step/2/0/conversation")
    assert "<html" not in page and '<pre class="thought">&lt;think&gt;7, 7' in page and "What is 7 + 7?" in page
    (address,) = re.findall(r'data-src="(/runs/1/step/2/rows[^"]*)"', read_page(shared, "/runs/1/step/2"))
    page = read_page(shared, unescape(address))
    assert "<html" not in page and page.count("/conversation") == 2


def test_search_over_all_iterations(client: TestClient, tmp_path: Path) -> None:
    reply = make_group(18, ("14", 0.25))
    reply.trajectories[0].turns[0].observation = [{"role": "tool", "content": "a Rare\nword of a tool"}]
    write_groups(tmp_path / "outputs/first", 3, [reply], "val")
    update_index(tmp_path / "outputs")

    def search(query: str) -> list[str]:
        return re.findall(r'data-src="/runs/1/([^"]*)/conversation"', read_page(client, f"/runs/1/samples?{query}"))

    assert search("") == ["step/3/0", "step/3/1", "val/3/0", "step/2/0", "step/2/1", "step/1/0", "step/1/1"]
    assert search("text=rare+WORD") == ["val/3/0"] and search("text=raree") == []
    assert search("text=What+is+7&where=reward&is=equal+to&number=0.25") == ["val/3/0"]
    assert search("text=think&before=2") == ["step/2/0", "step/1/0"]
    assert search("of=val&prompt_id=18") == ["val/3/0"] and search("of=step&prompt_id=18") == []
    assert search("sort=reward&text=15")[:2] == ["step/3/1", "step/2/1"]
    assert "No sample fits" in read_page(client, "/runs/1/samples?outcome=grader_failed")


def test_a_search_that_ends_early_continues(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphaapollo.plugins.viewer.sample_pages.MAX_FOUND", 2)
    page = read_page(client, "/runs/1/samples?text=What")
    assert page.count("/conversation") == 2 and 'href="?text=What&amp;before=2"' in page


def test_configuration_shows_first_what_was_set(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "outputs/first/config.1.yaml").write_text("trainer: {seed: 7, total_training_steps: 9, logger: null}")
    page = read_page(client, "/runs/1/config")
    rows = re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td><td class="differs">([^<]*)</td>', page)
    null = ("trainer.logger", "", "null")
    assert rows == [("actor_rollout_ref.model.path", "m", ""), null, ("trainer.seed", "0", "7")]


def test_groups_of_an_iteration(client: TestClient, tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "outputs/first/rollouts")
    failed = make_group(20, ("a", math.nan), ("b", math.nan))
    for trajectory in failed.trajectories:
        trajectory.score = Score(math.nan, {}, Outcome.GRADER_FAILED, "no grader")
    log.write(4, [make_group(18, ("a", 0.25), ("long", 0.25)), make_group(19, ("14", 1.0), ("15", 0.0)), failed])
    values = np.zeros(3, np.float32)
    rows = [TrainedRow(19, sample, 0, None, values + at) for sample, at in ((0, 1.0), (1, -1.0))]
    log.write_trained_rows(4, rows)
    log.close()
    update_index(tmp_path / "outputs")

    def list_groups(query: str = "") -> list[str]:
        return re.findall(
            r'href="[^"]*prompt_id=(\d+)&amp;data_source=sums"', read_page(client, f"/runs/1/step/4{query}")
        )

    page = read_page(client, "/runs/1/step/4")
    row = [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", page.split("<tr>")[3])]
    cells = ["", "What is 7 + 7?", "0.500", "1 x 1, 1 x 0", "trained", "0.500", "-1 to 1", "3", "stop", "19 x 2"]
    assert row == cells and 'y="0.0" width="4" height="15.0"' in page
    assert page.count('state filtered">') == page.count('state failed">') == 1
    assert list_groups() == ["18", "19", "20"]
    assert list_groups("?sort=variance&down=1") == ["19", "18", "20"]
    assert list_groups("?sort=status") == ["20", "18", "19"] and list_groups("?status=failed") == ["20"]
    assert list_groups("?where=reward&is=equal+to&number=0.25") == ["18"]


def test_trajectory_shows_conversation_and_tokens(shared: TestClient) -> None:
    page = read_page(shared, "/runs/1/step/2/0")
    assert '<pre class="thought">&lt;think&gt;7, 7&lt;/think&gt;</pre><pre class="text">14</pre>' in page
    assert "What is 7 + 7?" in page and "because" in page
    facts = re.findall(r'<span class="([^"]*)" data-facts="([^"]*)">', page)
    assert [kind for kind, _ in facts] == ["context", "context", "c0", "c-4", "c0"]
    expected = "3 token 6 engine -0.200 trainer -0.700 difference -0.500 advantage 0.500 weights 3"
    assert " ".join(facts[3][1].split()) == expected


def test_validation_samples_have_no_values_of_the_trainer(client: TestClient, tmp_path: Path) -> None:
    group = make_group(17, ("14", 1.0))  # numbers of a training sample
    group.trajectories[0].score = Score(0.0, reason="the tests printed: a\n< b")
    write_groups(tmp_path / "outputs/first", 2, [group], "val")
    update_index(tmp_path / "outputs")
    page = read_page(client, "/runs/1/val/2/0")
    assert "<pre>the tests printed: a &lt; b</pre>" in page and "<dd>scored</dd>" in page
    facts = re.findall(r'data-facts="([^"]*)">', page)
    assert " ".join(facts[3].split()) == "3 token 6 engine -0.200 trainer - difference - advantage - weights 3"


def test_curves(shared: TestClient) -> None:
    (line,) = shared.get("/curves?metric=critic/score/mean&run=1").json()
    assert (line["x"], line["y"], line["name"]) == ([1, 2, 3], [0.1, 0.2, 0.3], "first")
    *runs, mean = shared.get("/curves?metric=critic/score/mean&run=1&run=2&seeds=1").json()
    assert mean["y"] == pytest.approx([0.6, 0.7, 0.8])
    assert [run["y"][0] for run in runs] == pytest.approx([0.1, 1.1])  # two seeds have lines, no band
    points, smooth = shared.get("/curves?metric=critic/score/mean&run=1&smooth=0.75").json()
    assert points["mode"] == "markers" and smooth["y"][1] == pytest.approx((0.2 + 0.75 * 0.1) / 1.75)
    assert points["y"] == [0.1, 0.2, 0.3]


TOO_LARGE = (
    *(f"/runs/{10**23}", f"/runs/{'1' * 5000}", f"/runs/1/step/2?page={10**20}"),
    *(f"/curves?run={10**23}", f"/events?run={10**23}"),
)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/runs/9", "no run 9"),
        ("/runs/1/step/7", "iteration 7."),
        ("/runs/1/step/1/9", "no sample 9"),
        ("/runs/1/step/1?view=samples&sort=answer", "by answer"),
        ("/runs/1/step/1/0?color=pink", "by pink"),
        ("/runs/1/step/1/0?with=x", "not enough values"),
        ("/compare", "Choose runs"),
        ("/nothing", "Not Found"),
        *((path, "") for path in TOO_LARGE),
    ],
)
def test_errors_are_pages(shared: TestClient, path: str, text: str) -> None:
    response = shared.get(path)
    assert response.status_code == 404 and text in response.text


@pytest.mark.parametrize(("host", "address"), [("::1", "[::1]:6060"), ("127.0.0.1", "localhost:1")])
def test_the_viewer_answers_at_its_own_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str, address: str
) -> None:
    codes = []

    def make_server(app: Any) -> Any:
        with TestClient(app) as client:
            codes.extend(client.get("/", headers={"host": name}).status_code for name in (address, "evil.example"))
        return SimpleNamespace(run=lambda sockets: sockets[0].close())

    monkeypatch.setattr("alphaapollo.plugins.viewer.app.make_server", make_server)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "own"))
    assert main(["view", str(tmp_path), "--host", host, "--port", "0"]) == 0
    assert codes == [200, 400]
    assert f"http://{'[::1]' if ':' in host else host}:" in capsys.readouterr().out


def test_damaged_rollouts_of_an_unknown_kind(client: TestClient, tmp_path: Path) -> None:
    rollouts = tmp_path / "outputs/first/rollouts"
    (rollouts.parent / "config.yaml").write_text("a: [1,")
    (rollouts / "trained_000002.npz").write_bytes(b"PK")
    (rollouts / "step_000001.jsonl").write_text("{}")
    assert read_page(client, "/runs/1") and "unknown" in read_page(client, "/")
    for path in ("/runs/1/step/2", "/runs/1/step/2/1"):
        assert "trained_000002.npz cannot be read" in read_page(client, path)
    (rollouts / "step_000003.jsonl").unlink()
    page = client.get("/runs/1/step/3/0").text
    assert "cannot be read" in page or "no sample 0" in page


def test_state_of_runs(client: TestClient, tmp_path: Path) -> None:
    folder = tmp_path / "outputs/first"
    assert 'class="state ended"' in read_page(client, "/runs/1")
    with lock_folder(folder):
        assert f"process {os.getpid()}" in read_page(client, "/runs/1")
    with record_in_history(folder):
        pass
    assert 'class="state finished"' in read_page(client, "/runs/1")
    with pytest.raises(ValueError), record_in_history(folder):
        raise ValueError("no more memory")
    assert "no more memory" in read_page(client, "/runs/1")
    host, now = socket.gethostname(), time.time()
    for own, age, state, text in [
        (host, 0, "running", "generate 3/32 for 0:05, 10 of about 40 tokens, 1:30 left"),
        (host, 99, "running", "no news for 1:39"),
        ("node7", 0, "running", "on node7"),
        ("node7", 3600, "killed", "its status for 1:00:00"),
    ]:
        (folder.parent / ".first.lock").write_text(json.dumps({"pid": os.getpid(), "host": own, "since": ""}))
        status = RunStatus("generate", "3/32", now - age - 5, now - age, 2, 10, 40.0, 90.0, os.getpid())
        write_run_status(folder, status)
        page = read_page(client, "/runs/1")
        assert f'class="state {state}"' in page and text in page
        assert ("<dt>time left</dt><dd>1:30" in page) == (state == "running")
    lock = {"pid": 2**22 + 1, "host": socket.gethostname(), "since": ""}
    (folder.parent / ".first.lock").write_text(json.dumps(lock))
    assert 'class="state killed"' in read_page(client, "/runs/1")


def test_new_iterations_reach_an_open_page(client: TestClient, tmp_path: Path) -> None:
    write_groups(tmp_path / "outputs/first", 4, [make_group(18, ("late", 1.0))])
    deadline = time.monotonic() + 20
    while "step 4" not in client.get("/runs/1").text:
        assert time.monotonic() < deadline, "iteration 4 did not appear"
        time.sleep(0.1)


def test_problem_of_the_index_and_unread_files_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "outputs/first")
    (run / "pool.jsonl").mkdir()
    client = TestClient(make_app(index := update_index(tmp_path / "outputs"), ["testserver"]))
    index.problem = "OperationalError: database is full"
    assert "database is full" in read_page(client, "/")
    assert "pool.jsonl was skipped" in read_page(client, "/runs/1")
    index.path.unlink()
    assert client.get("/").status_code == 503
