"""Pages of evaluations, evolutions and fine-tuning runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from alphaapollo.runs.run_history import JsonlTracker
from alphaapollo.viewer.app import make_app
from tests.unit.viewer.run_kit import (
    HOSTILE,
    update_index,
    write_evaluation,
    write_evolution,
    write_example_run,
    write_run,
)

Read = Callable[[str], str]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Function that indexes tmp_path/outputs and returns a page as one line."""

    def read(path: str) -> str:
        response = TestClient(make_app(update_index(tmp_path / "outputs"), ["testserver"])).get(path)
        assert response.status_code == 200, response.text
        return re.sub(r"\s+", " ", response.text)

    return read


def test_distillation_is_shown_by_divergence_and_agreement(read: Read, tmp_path: Path) -> None:
    tracker = JsonlTracker(write_run(tmp_path / "outputs/distilled") / "metrics.jsonl", 3)
    tracker.log(4, {"critic/score/mean": 0.0, "distill/agreement": 0.75, "distill/divergence": 0.5})
    tracker.close()
    assert "distill/divergence</span> 0.500" in read("/") and "distill/agreement</span> 0.750" in read("/")
    curves = re.findall(r"/curves\?metric=([a-z/_]*)", read("/runs/1"))
    assert curves[:3] == ["distill/divergence", "distill/agreement", "critic/score/mean"]


def test_evaluation(read: Read, tmp_path: Path) -> None:
    write_evaluation(tmp_path / "outputs/eval")
    assert "avg@2</span> 0.750" in read("/")
    page = read("/runs/1")
    cells = dict(re.findall(r'<th scope="row">([^<]*)</th><td class="n">([^<]*)</td>', page))
    assert cells["avg@2"] == cells["pass@1"] == "0.750 (0.500 to 1)"
    assert (cells["pass@2"], cells["problems"], cells["samples"], cells["failed, excluded"]) == ("1 (1 to 1)", *"240")
    assert "No metrics yet" not in page and 'href="/runs/1/results/0">Problems</a>' in page
    problems = read("/runs/1/results/0?sort=accuracy")
    assert re.findall(r'href="\?view=samples&amp;prompt_id=(\d)&amp;', problems) == ["1", "0"]
    assert ">status<" not in problems and ">advantage<" not in problems


@pytest.mark.parametrize("is_complete", [True, False])
def test_evolution(read: Read, tmp_path: Path, is_complete: bool) -> None:
    write_evolution(tmp_path / "outputs/evolve", is_complete=is_complete)
    page = read("/runs/1")
    assert re.findall(r'<th scope="row">(right|wrong)</th><td class="n">(\d)</td><td class="n">(\d)</td>', page) == [
        ("right", "1", "0"),
        ("wrong", "0", "1"),
    ]
    rounds = re.findall(r'<tr><td class="n">(\d)</td><td class="n">([\d.]+)', page)
    assert rounds == [("0", "0"), ("1", "1")]  # the chosen solution is wrong after round 0, and right after round 1
    assert ("Accuracy of the final choice: 1." in page) == is_complete
    problems = read("/runs/1/problems")
    cells = [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", problems)]
    assert cells == ["17", "2", "1", "0", "2", "2"]
    page = read("/runs/1/problems/17")
    assert page.index("p17.r1.b0.i0") < page.index("p17.r0.b0.i0"), "the chosen solution is first"
    assert "What is 7 + 7?" in page and "vote against" in page and "14 report 1" in page and "of the majority" in page
    assert ("<dt>ground truth</dt>" in page) == is_complete
    assert "right: because" in page and "2 for, 0 against" in page


def test_examples_of_supervised_fine_tuning(read: Read, tmp_path: Path) -> None:
    write_example_run(tmp_path / "outputs/sft", count=9)
    page = read("/runs/1/examples")
    assert page.count("What is 7 + 7? <mark>it is 14</mark>") == 8 and "page 1 of 2" in page
    assert "4 tokens, 2 trained on" in page and "log-prob under the reference model -1.500" in page
    assert "Example 9" in read("/runs/1/examples?page=1")
    (tmp_path / "outputs/sft/examples.jsonl").write_text('{"rows": [')
    assert "No examples yet." in read("/runs/1/examples")


def test_pairs_side_by_side(read: Read, tmp_path: Path) -> None:
    write_example_run(tmp_path / "outputs/dpo", is_pair=True)
    page = read("/runs/1/examples")
    assert '<pre class="text">What is 7 + 7? </pre>' in page
    assert "it is <ins>14</ins>" in page and "it is <del>15</del>" in page
    assert "reference model</dt><dd>1.500</dd>" in page


def test_hostile_texts_are_escaped(read: Read, tmp_path: Path) -> None:
    write_evaluation(tmp_path / "outputs/a", HOSTILE)
    write_evolution(tmp_path / "outputs/b", HOSTILE)
    write_example_run(tmp_path / "outputs/c", HOSTILE)
    write_example_run(tmp_path / "outputs/d", HOSTILE, is_pair=True)
    for path in ("/runs/1/results/0", "/runs/2", "/runs/2/problems/17", "/runs/3/examples", "/runs/4/examples"):
        page = read(path)
        assert "<script>document" not in page and "<img src=x" not in page and "<style>" not in page


def test_the_chosen_solution_is_the_first(read: Read, tmp_path: Path) -> None:
    write_evolution(tmp_path / "outputs/evolve")
    page = read("/runs/1/problems/17")
    assert page.index("Solution p17.r1.b0.i0") < page.index(">chosen<") < page.index("Solution p17.r0.b0.i0")


def test_damaged_pool(read: Read, tmp_path: Path) -> None:
    folder = write_evolution(tmp_path / "outputs/evolve", is_complete=False)
    with (folder / "pool.jsonl").open("ab") as file:
        file.write(b'not json\n{"kind": "candidate", "key": "x"}\n{"kind": "call", "key": "p17.r0"}\n{"kind": "verd')
    assert "2 damaged lines" in read("/runs/1")
    assert read("/runs/1/problems").count("/problems/17") == 1
