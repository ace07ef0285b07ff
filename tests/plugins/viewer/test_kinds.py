"""Pages of evaluations, evolutions and fine-tuning runs, of images, and of a verified update."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from alphaapollo.plugins.viewer.app import make_app
from alphaapollo.plugins.viewer.run_folders import describe_algorithm, find_kind
from alphaapollo.plugins.viewer.samples import Token, join_equal_tokens
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.rollout_log import name_image
from tests.plugins.viewer.run_kit import (
    HOSTILE,
    MISSING,
    PAGES,
    make_group,
    read_page,
    update_index,
    write_evaluation,
    write_every_kind,
    write_evolution,
    write_example_run,
    write_groups,
    write_run,
    write_update_checks,
)
from tests.unit.rollout.test_images import SMALL, WIDE

Read = Callable[[str], str]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Function that indexes tmp_path/outputs and returns a page as one line."""
    root = tmp_path / "outputs"
    return lambda path: read_page(TestClient(make_app(update_index(root), ["testserver"])), path)


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
    assert cells == ["17", "1", "2", "0", "2", "2"]
    page = read("/runs/1/problems/17")
    solutions = [page.index(f"Solution p17.r{number}.b0.i0") for number in (1, 0)]
    assert solutions == sorted(solutions), "the chosen solution is first"
    assert ">chosen<" in page[slice(*solutions)] or not is_complete
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


@pytest.fixture(scope="module")
def hostile_client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    root = tmp_path_factory.mktemp("hostile") / "outputs"
    write_every_kind(root, HOSTILE)
    return TestClient(make_app(update_index(root), ["testserver"]))


@pytest.mark.parametrize("path", PAGES)
def test_nothing_that_a_model_writes_becomes_part_of_a_page(hostile_client: TestClient, path: str) -> None:
    response = hostile_client.get(path)
    assert response.status_code == (404 if path == MISSING else 200)
    for markup in ("<script>document", "<img src=x", "<style>"):
        assert markup not in response.text
    policy = response.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "default-src 'none'" in policy and "unsafe" not in policy


def test_damaged_pool(read: Read, tmp_path: Path) -> None:
    folder = write_evolution(tmp_path / "outputs/evolve", is_complete=False)
    with (folder / "pool.jsonl").open("ab") as file:
        file.write(b'not json\n{"kind": "candidate", "key": "x"}\n{"kind": "call", "key": "p17.r0"}\n{"kind": "verd')
    assert "2 damaged lines" in read("/runs/1")
    assert read("/runs/1/problems").count("/problems/17") == 1


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    root = tmp_path / "outputs"
    folder = write_run(root / "first", steps=0)
    group = make_group(17, ("15", 1.0))
    group.prompt.content[1] |= {"content": "<image> How many?", "images": [SMALL]}
    group.trajectories[0].turns[0].observation = [{"role": "tool", "content": "<image>", "images": [WIDE]}]
    write_groups(folder, 1, [group])
    (root / "secret.png").write_bytes(SMALL)
    (folder / "rollouts/images/secret.png").write_bytes(SMALL)
    second = write_evaluation(root / "second")
    (second / "images").mkdir()
    (second / name_image(WIDE)).write_bytes(WIDE)
    return TestClient(make_app(update_index(root), ["testserver"]))


def test_thumbnails_open_the_image(client: TestClient) -> None:
    page = client.get("/runs/1/step/1/0").text
    for encoded_image in (SMALL, WIDE):
        address = f"/runs/1/images/{name_image(encoded_image).removeprefix('images/')}"
        assert f'<a class="image" href="{address}"><img src="{address}" alt="image 1 of this message"' in page
        response = client.get(address)
        assert response.content == encoded_image and response.headers["content-type"] == "image/png"
        assert "img-src 'self'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
    assert client.get(f"/runs/2/images/{Path(name_image(WIDE)).name}").content == WIDE


@pytest.mark.parametrize(
    "name",
    ["secret.png", "..%2F..%2F..%2Fsecret.png", "%2e%2e%2fimages", f"{'0' * 32}.png", "a%00.png", f"{'a' * 32}.png"],
)
def test_only_images_of_the_log_are_served(client: TestClient, tmp_path: Path, name: str) -> None:
    link = tmp_path / "outputs/first/rollouts/images" / f"{'a' * 32}.png"
    link.symlink_to(tmp_path / "outputs/secret.png")  # a file outside of the run
    assert client.get(f"/runs/1/images/{name}").status_code == 404
    assert client.get(f"/runs/7/images/{name_image(SMALL).removeprefix('images/')}").status_code == 404


def test_placeholders_of_an_image_are_one_token() -> None:
    tokens = [Token("a", 1, False), *[Token("<|image_pad|>", 5, False)] * 64, *[Token("b", 2, True)] * 9]
    joined = list(join_equal_tokens(tokens))
    assert [token.text for token in joined] == ["a", "<|image_pad|> x 64 ", *["b"] * 9]


def test_verified_update(read: Read, tmp_path: Path) -> None:
    write_run(tmp_path / "outputs/first")
    write_update_checks(tmp_path / "outputs/first")
    page = read("/runs/1")
    assert '<td class="n">5.0e-01</td><td class="n">1e-03</td><td>FAILED</td><td>&lt;b&gt;</td>' in page
    assert '<td>weights</td><td class="n"></td><td class="n"></td><td>not covered</td>' in page


@pytest.mark.parametrize(
    ("estimator", "divergence", "loss", "label"),
    [
        ("grpo", "null", "ppo", ("RL", "grpo")),
        ("grpo", "null", "gspo", ("RL", "grpo, gspo")),
        ("none", "reverse", "ppo", ("RL", "distillation")),
        ("none", "null", "ppo", ("own loop", "")),
        ("none", "null", "ppo_kl", ("own loop", "ppo_kl")),
    ],
)
def test_labels_of_policy_runs(
    tmp_path: Path, estimator: str, divergence: str, loss: str, label: tuple[str, str]
) -> None:
    policy_loss = f"actor_rollout_ref: {{actor: {{policy_loss: {{loss_mode: {loss}}}}}}}"
    lines = [f"algorithm: {{adv_estimator: {estimator}}}", f"teacher: {{divergence: {divergence}}}", policy_loss]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    assert (find_kind(tmp_path), describe_algorithm(tmp_path)) == label
