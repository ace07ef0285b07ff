"""Which runs belong together, and what the viewer draws of several runs, or of equal and constant curves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from html import unescape
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from alphaapollo.plugins.viewer.app import make_app
from alphaapollo.plugins.viewer.curves import tabulate
from alphaapollo.plugins.viewer.experiments import group_runs
from alphaapollo.runs.command_history import record_in_history
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.run_plan import RunPlan, write_run_plan
from tests.plugins.viewer.run_kit import make_group, read_page, update_index, write_groups, write_run


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """Viewer of two runs, seeds of one experiment."""
    for seed, name in enumerate(("first", "second")):
        write_run(tmp_path / "outputs" / name, seed=seed)
    with TestClient(make_app(update_index(tmp_path / "outputs"), ["testserver"])) as client:
        yield client


A = {"model": {"path": "/a"}, "data": {"files": "x.jsonl"}, "trainer": {"seed": 0}}


@pytest.mark.parametrize(
    ("config", "model", "data", "are_seeds"),
    [
        ({"trainer": {"seed": 1, "experiment_name": "b"}}, "0a", "1d", True),
        ({"model": {"path": "/moved"}}, "0a", "1d", True),
        ({}, "0b", "1d", False),
        ({}, "0a", "2d", False),
        ({}, "", "1d", False),
        ({"optim": {"lr": 0.5}}, "0a", "1d", False),
    ],
)
def test_seeds_have_the_same_model_data_and_settings(
    tmp_path: Path, config: dict[str, object], model: str, data: str, are_seeds: bool
) -> None:
    known = "0a" if model else ""  # without the digest of the model, equal data is not enough
    for name, own, digests in (("a", {}, (known, "1d")), ("b", config, (model, data))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(A | own))
        inputs = {
            key: [("x", digest)] for key, digest in zip(("model.path", "data.files"), digests, strict=True) if digest
        }
        write_run_plan(tmp_path / name, RunPlan({}, inputs=inputs))
    folders = {1: tmp_path / "a", 2: tmp_path / "b"}
    groups = group_runs(folders, tmp_path, by_seed=True)
    assert list(groups.values()) == ([[1, 2]] if are_seeds else [[1], [2]])
    assert not are_seeds or list(groups) == ["a (2 seeds)"]
    with suppress(KeyboardInterrupt), record_in_history(tmp_path / "b"):
        raise KeyboardInterrupt
    assert [*group_runs(folders, tmp_path, by_seed=True).values()] == [[1], [2]], "a run that ended early is no seed"


def test_labels_are_the_keys_that_differ(tmp_path: Path) -> None:
    def label(*configs: dict[str, object]) -> list[str]:
        for number, config in enumerate(configs):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / "config.yaml").write_text(
                yaml.safe_dump({"trainer": {"project_name": number}} | config)
            )
        return list(group_runs({at: tmp_path / str(at) for at in range(len(configs))}, tmp_path, by_seed=False))

    def make(lr: float, seed: int, **others: object) -> dict[str, object]:
        return {"optim": {"lr": lr}, "data": {"seed": seed, "env_seed": seed}, **others}

    assert label(make(0.1, 1), make(0.1, 2), make(0.2, 1)) == [
        "lr=0.1 env_seed=1",
        "lr=0.1 env_seed=2",
        "lr=0.2 env_seed=1",
    ]
    assert label({"model": {"path": "/x/small"}}, {"model": {"path": "/y/large"}}) == ["path=small", "path=large"]
    assert label({"model": {"path": "/x/model"}}, {"model": {"path": "/y/model"}}) == ["0", "1"]
    assert label({"api_key": "secret"}, {"api_key": "other"}) == ["0", "1"]
    for number, digest in enumerate(("bb" * 8, "cc" * 8)):
        write_run_plan(tmp_path / str(number), RunPlan({}, inputs={"model.path": [("/x", digest)]}))
    model = {"model": {"path": "/x"}}
    assert label(model | make(0.1, 1), model | make(0.1, 2)) == [
        "path (content)=bbbbbbbb env_seed=1",
        "path (content)=cccccccc env_seed=2",
    ]
    assert label(dict(zip("abcd", range(4), strict=True)), dict(zip("abcd", range(1, 5), strict=True))) == ["0", "1"]


def test_comparison_has_final_values_and_differences(client: TestClient, tmp_path: Path) -> None:
    for name, accuracy in (("first", 0.25), ("second", 0.75)):
        tracker = JsonlTracker(tmp_path / "outputs" / name / "metrics.jsonl", 9)
        for step in (10, 11):
            metrics = {"reward/accuracy": accuracy + step, "critic/score/mean": accuracy + step, "groups/mixed": 0.5}
            components = {"reward/component/b": step, "reward/component/a": step * accuracy}
            tracker.log(step, metrics | components | {"val/accuracy": accuracy})
        tracker.close()
        write_groups(
            tmp_path / "outputs" / name,
            11,
            [make_group(17, ("14", accuracy)), make_group(18, ("", 0), question="?")],
            "val",
        )
    update_index(tmp_path / "outputs")
    page = read_page(client, "/compare?run=1&run=2")
    drawn = ["critic/score/mean", "reward/accuracy", "reward/component/a", "reward/component/b", "val/accuracy"]
    assert sorted(re.findall(r'data-src="/curves\?metric=([^&]*)&', page)) == drawn
    assert "constant: groups/mixed = 0.500" in page and page.count('data-plain="1"') == 5
    rows = re.findall(r'stroke="(#\w+)".*?<a href="/runs/(\d)">(.*?)</a></td>(.*?)</tr>', page)
    assert [(color, run, label) for color, run, label, _ in rows] == [
        ("#D55E00", "2", "seed=1"),
        ("#0072B2", "1", "seed=0"),
    ]
    assert '<td class="n">0.750</td>' in rows[0][3]
    cells = '<td>seed=1</td><td class="n">0.250 (0 to 0.500)</td><td>accuracy</td><td>validation, iteration 11</td>'
    assert "Differences from seed=0 over the same prompts" in page and cells in page


def test_page_of_a_run_shows_components_and_each_curve_once(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "outputs/third").mkdir()
    tracker = JsonlTracker(tmp_path / "outputs/third/metrics.jsonl", 0)
    for step in (4, 5):
        score = {"reward/accuracy": step, "critic/score/mean": step, "reward/component/a": 2.0 * step}
        tracker.log(step, score | {"val/component/a": 0.5, "val/accuracy": 0.5})
    tracker.close()
    update_index(tmp_path / "outputs")
    page = read_page(client, "/runs/3")
    assert re.findall(r'data-src="/curves\?metric=([^&]*)&', page) == ["reward/accuracy", "reward/component/a"]
    assert '<a href="?metric=reward%2Fcomponent%2Fa" title="full size">' in page
    assert 'class="chart large"' in read_page(client, "/runs/3?metric=val/accuracy")
    training, validation = client.get("/curves?metric=reward/component/a&run=3").json()
    assert (training["y"], validation["y"]) == ([8.0, 10.0], [0.5, 0.5])


def test_plot_on_the_first_page_has_runs_on_the_same_model(client: TestClient, tmp_path: Path) -> None:
    page = read_page(client, "/")
    assert "Newest runs on the same model and data" in page and ">seed=0</a>" in page and ">seed=1</a>" in page
    for inputs in ({"actor_rollout_ref.model.path": [("m", "0b")]}, {}):
        write_run_plan(tmp_path / "outputs/second", RunPlan({}, inputs=inputs))
        assert "Newest runs" not in read_page(client, "/")


def test_equal_texts_with_other_columns_are_other_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "runs/run"
    groups = [make_group(number, ("14", 1.0), ("15", 0.0)) for number in range(3)]
    for number, group in enumerate(groups):
        group.prompt.env_kwargs["seed"] = number // 2
    write_groups(folder, 0, groups, "val")
    (folder / "config.yaml").touch()
    lines = [json.loads(line) for line in (folder / "rollouts/val_000000.jsonl").read_bytes().splitlines()]
    with closing(update_index(folder.parent).connect()) as database:
        assert tabulate(database, [1], "val", 0)["samples"].tolist() in ([4, 2], [2, 4])
    earlier = "".join(json.dumps(line | {"prompt_digest": ""}) + "\n" for line in lines)
    (folder / "rollouts/val_000000.jsonl").write_text(earlier)
    with closing(update_index(folder.parent).connect()) as database:
        assert tabulate(database, [1], "val", 0)["samples"].tolist() == [6]


def test_samples_of_the_same_prompt_are_found_by_its_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "outputs" / "first")
    write_groups(folder, 2, [make_group(17, ("8", 1.0), question="What is 5 + 3?")], "val")  # row 17 of another file
    write_groups(folder, 3, [make_group(5, ("14", 0.25))], "val")
    with TestClient(make_app(update_index(tmp_path / "outputs"), ["testserver"])) as client:
        page = read_page(client, "/runs/1/step/2/0")
        links = re.findall(r'<a href="/runs/1/(\w+/\d/\d)">\w+ \d, sample', page)
        assert links == ["step/3/0", "step/3/1", "val/3/0", "step/2/0", "step/2/1", "step/1/0", "step/1/1"]
        (curve,) = re.findall(r'data-src="(/curves[^"]*question[^"]*)"', page)
        points, mean, _, validation = client.get(unescape(curve)).json()
    assert (points["x"], points["y"]) == ([1, 1, 2, 2, 3, 3], [1.0, 0.0] * 3)
    assert (mean["x"], mean["y"], mean["name"]) == ([1, 2, 3], [0.5] * 3, "training")
    assert (validation["x"], validation["y"], validation["name"]) == ([3], [0.25], "validation")
