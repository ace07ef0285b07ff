"""Reports of one and of several runs: numbers worked out by hand, hostile texts, damaged folders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from alphaapollo.cli.main import main
from alphaapollo.plugins.viewer.report import choose_evenly, format_value, make_block, make_code, make_report
from alphaapollo.processes.folder_lock import lock_folder
from alphaapollo.runs.command_history import record_in_history
from alphaapollo.runs.input_digests import digest_file
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.run_plan import RunPlan, write_run_plan
from tests.plugins.viewer.run_kit import (
    HOSTILE,
    make_group,
    write_evaluation,
    write_evolution,
    write_groups,
    write_run,
    write_suite_results,
    write_update_checks,
)

HOSTILE_TEXTS = [
    HOSTILE,
    "[click](javascript:alert(1)) ![x](https://evil.example/x.png) <https://evil.example> www.evil.example a@evil.io",
    "```\n</code></pre><script>alert(1)</script>\n`````\n# heading\n~~~\n| a | b |\n|---|---|\n",
    "\x1b[31mred\x1b[0m \x00 \u202eevil\u202c \u2066x\u2069 \ud800 \r\n\ttab",
    '"), #panic("typst"), raw("\\" #[x] $x$ \\u{41} = heading',
]


def write_validations(folder: Path, *rewards: Sequence[float], texts: Sequence[str] = ()) -> None:
    """Write a validation per list of rewards, at iterations 0, 1, ..., with a prompt per reward."""
    tracker = JsonlTracker(folder / "metrics.jsonl", 99)
    for step, values in enumerate(rewards):
        names = texts or [f"answer {value:g}" for value in values]
        groups = [make_group(at, (names[at], value), question=f"question {at}") for at, value in enumerate(values)]
        write_groups(folder, step, groups, "val")
        tracker.log(step, {"val/accuracy": sum(values) / len(values)})
    tracker.close()


def report(*folders: Path) -> str:
    """Text of a report. Headings, items, cells and code are marked as in Markdown."""
    page = make_report(folders).decode().partition("<body>")[2]
    for pattern, mark in (
        (r"</?code>", "`"),
        (r"<h([123])>", lambda found: "#" * int(found[1]) + " "),
        (r"<li>", "* "),
    ):
        page = re.sub(pattern, mark, page)
    return unescape(re.sub(r"<[^>]+>", "", re.sub(r"</t[dh]>(<t[dh][^>]*>)?|(?<=<tr>)<t[dh][^>]*>", " | ", page)))


def read_html(content: bytes) -> tuple[str, set[str], dict[str, str]]:
    """Text, names of the elements, and all attributes of a page."""
    texts, names, attributes = [], set(), {}

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            names.add(tag)
            attributes.update({f"{tag} {name}": value or "" for name, value in attrs})

        def handle_data(self, data: str) -> None:
            texts.append(data)

    Reader().feed(content.decode())
    return " ".join("".join(texts).split()), names, attributes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


def test_run(run: Path) -> None:
    write_validations(run, [0, 0, 0, 0, 1], [1, 1, 1, 1, 1])
    with record_in_history(run):
        pass
    text, names, attributes = read_html(make_report([run]))
    assert "first: RL, finished, 3 of 9" in text
    # of 5 prompts: no resample of 2.5 % of the probability has only the last prompt: (1/5)^5 = 0.03 %
    for fact in ("rose from 0.2 [0, 0.6] to 1 [1, 1]:", "0.8 [0.4, 1]"):
        assert fact in text
    assert "question 4" in text and "answer 0" in text and "answer 1" in text
    assert re.search(r"torch \d", text) and re.search(r"commit \w", text)
    assert {"img", "table", "pre", "h1", "h2", "h3"} <= names and "script" not in names
    assert attributes["img src"].startswith("data:image/svg+xml;base64,")
    assert "critic/score/mean by iteration: first" in attributes["img alt"]
    assert make_report([run]) == make_report([run])


def test_change_within_chance_is_called_unclear(run: Path) -> None:
    write_validations(run, [0, 0, 1], [1, 1, 1])
    # A resample has only the unchanged prompt with probability 1/27 = 3.7 % > 2.5 %, so the interval contains 0.
    assert "not clearly change from 0.3333 [0, 1] to 1" in (text := report(run)) and "0.6667 [0, 1]" in text


def test_bands_over_prompts_of_training(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "first", steps=1)
    write_groups(folder, 1, [make_group(n, ("a", n / 10), ("b", n / 10), question=str(n)) for n in (3, 7)])
    # Two prompts: half of the resamples have both, a quarter each has one of them twice.
    assert "| `critic/score/mean` | 0.1 [0.3, 0.7] | 1 |" in report(folder)


def test_equal_prompts_are_one_problem_without_interval(run: Path) -> None:
    for step, reward in ((0, 0.25), (3, 0.75)):
        write_groups(run, step, [make_group(number, ("a", reward)) for number in range(4)], "val")
    assert "from 0.25 to 0.75: a difference of 0.5 " in report(run)


def test_seeds_have_an_interval_and_groups_a_difference(tmp_path: Path) -> None:
    slow = [write_run(tmp_path / f"slow{seed}", seed=seed) for seed in (0, 1, 2)]
    fast = [write_run(tmp_path / f"fast{seed}", seed=seed) for seed in (10, 11)]
    for folder in fast:
        config = yaml.safe_load((folder / "config.yaml").read_text()) | {"optim": {"lr": 0.5, "api_key": "very-secret"}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    text = report(*slow, *fast)
    # slow: 0.3, 1.3, 2.3: mean 1.3, t(0.975, 2) * 1 / sqrt(3) = 4.303 * 0.577 = 2.484
    assert "lr=- (3 seeds) | 1.1 [-1.38, 3.58] | 1 | 1.3 [-1.18, 3.78] | 3 |" in text
    # fast: 10.3, 11.3: mean 10.8, t(0.975, 1) * 0.707 / sqrt(2) = 12.706 * 0.5 = 6.353
    assert "lr=0.5 (2 seeds) | 10.6 [4.25, 17] | 1 | 10.8 [4.45, 17.2] | 3 |" in text
    # variances of the means 1/3 and 1/4: error 0.7638, (7/12)^2 / (1/9/2 + 1/16) = 2.882 degrees of freedom: t = 3.261
    row = "| `critic/score/mean` | lr=0.5 (2 seeds) | lr=- (3 seeds) | 9.5 [7.01, 12] | 3 |"
    assert row in text
    assert "| `optim.lr` | - | 0.5 |" in text and "| `trainer.seed` | 0, 1, 2 | 10, 11 |" in text
    assert "very-secret" not in text and "## Samples" not in text
    page, names, _ = read_html(make_report([*slow, *fast]))
    assert "img" in names and "Comparison of 5 runs" in page


def test_groups_are_compared_at_an_iteration_that_all_runs_have(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{at}", seed=at % 2, steps=2 if at > 1 else 4) for at in range(4)]
    for folder in runs[2:]:
        (folder / "config.yaml").write_text((folder / "config.yaml").read_text() + "optim: {lr: 0.5}\n")
    text = report(*runs)
    assert "lr=- (2 seeds) | 0.6 [-5.75, 6.95] | 1 | 0.9 [-5.45, 7.25] | 4 |" in text
    assert "| lr=0.5 (2 seeds) | lr=- (2 seeds) | 0 [-3.04, 3.04] | 2 |" in text


def test_groups_without_variance_have_a_difference_without_interval(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    for at, value in enumerate((1.0, 1.0, 0.5, 0.75)):
        folder = write_run(tmp_path / f"run{at}", seed=at)
        write_validations(folder, [value])
        config = yaml.safe_load((folder / "config.yaml").read_text()) | {"optim": {"lr": at // 2}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    text = report(*(tmp_path / f"run{at}" for at in range(4)))
    assert "* `val/accuracy` at the end, best first: lr=0 (2 seeds) 1 [1, 1]; lr=1 (2 seeds) 0.625 [0, 1]." in text
    assert "| `val/accuracy` | lr=1 (2 seeds) | lr=0 (2 seeds) | -0.375 | 0 |" in text
    assert "| runs | run0, run1 | run2, run3 |" in text
    assert not [one for one in recwarn if "Precision loss" in str(one.message)]


def test_evaluations_have_a_paired_difference(tmp_path: Path) -> None:
    before, after = (write_evaluation(tmp_path / name, num_problems=12) for name in ("one", "two"))
    results = (after / "results.jsonl").read_text()
    (after / "results.jsonl").write_text(results.replace('"accuracy": 0.0', '"accuracy": 1.0'))
    text = report(before, after)
    # One of 12 differences is 0.5. A resample has it at most 3 times with 98 %: 1.5 / 12.
    assert "* Accuracy (evaluation) of two minus one: 0.04167 [0, 0.125] over the same 12 prompts." in text
    assert "| evaluation | two | accuracy | 0.9583 [0.875, 1] | 1 [1, 1] | 0.04167 [0, 0.125] |" in text
    assert "| evaluation | two | pass@2 | 1 [1, 1] | 1 [1, 1] | 0 [0, 0] |" in text


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "a_b*c <b>[x](y)`", text=HOSTILE)
    write_validations(folder, [0.0] * len(HOSTILE_TEXTS), [1.0] * len(HOSTILE_TEXTS), texts=HOSTILE_TEXTS)
    for step in (0, 1):
        groups = [make_group(at, (text, 0.0), question=text) for at, text in enumerate(HOSTILE_TEXTS)]
        for group, text in zip(groups, HOSTILE_TEXTS, strict=True):
            group.prompt = replace(group.prompt, data_source=text, ground_truth=text)
        write_groups(folder, step, groups, "val_greedy")
    return folder


def test_hostile_texts_are_no_markup(hostile_run: Path) -> None:
    text, names, attributes = read_html(make_report([hostile_run]))
    assert names <= {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "ul", "li", "pre", "code"),
        *("table", "thead", "tbody", "tr", "th", "td", "img", "div"),
    }
    allowed = {"html lang", "meta charset", "meta name", "meta content", "meta http-equiv", "img src", "img alt"}
    assert attributes.keys() <= {*allowed, "th class", "td class", "code class", "main class", "div class", "h2 class"}
    assert HOSTILE in text and "[click](javascript:alert(1))" in text
    assert not re.search(r"[\x00-\x08\x1b\u202e\u2066\ud800]", text)
    policy = re.search(rb'Content-Security-Policy" content="([^"]*)"', make_report([hostile_run]))
    assert policy and policy[1].startswith(b"default-src 'none'; style-src 'sha256-") and b"unsafe" not in policy[1]


def test_values_in_a_line() -> None:
    assert [format_value(value) for value in ("# a\n\n* b", None, 1 / 3)] == ["# a * b", "-", "0.3333"]
    assert make_code("<b>") == "<code>&lt;b&gt;</code>" and make_code("") == "<code>-</code>"
    assert make_block("\x00") == "<pre><code>(empty)\n</code></pre>"


def test_samples_from_the_worst_to_the_best_change(run: Path) -> None:
    for step in (0, 5):
        rewards = [1.0 if step and at > 6 else 0.5 for at in range(18)]
        rewards[3] = 0.1 if step else 0.9
        groups = [make_group(at, ("x", reward), question=f"{at}?") for at, reward in enumerate(rewards)]
        write_groups(run, step, groups, "val")
    titles = re.findall(r"### \d+\. Prompt (\d+) of sums: (\w+)", text := report(run))
    assert len(titles) == 10 and titles[0] == ("3", "worse") and titles[-1] == ("17", "improved")
    assert text == report(run)
    assert choose_evenly(list("abc"), 10) == ["a", "b", "c"] and choose_evenly([], 3) == []


def test_training_samples_evaluation_suites_and_a_verified_update(run: Path) -> None:
    write_suite_results(run)
    write_update_checks(run)
    text = report(run)  # prompt 17 at iterations 1, 2 and 3
    assert "### 1. Prompt 17 of sums: unchanged" in text and "Iteration 1, reward 1" in text and "Iteration 3," in text
    assert "| lm-eval:gsm8k, step_20 | gsm8k exact_match | 0.25 | 4 |" in text
    assert "inspect:sums.py, model failed" in text
    assert "| advantages | 2.0e-08 | 1e-06 | ok | grpo, prompt 1, sample 0, token 2 (stored as float32) |" in text
    assert "| weights |  |  | not covered | TRPO |" in text


def test_evaluation_that_goes_on_or_has_ended(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "evaluation", num_problems=12)
    (folder / "summary.json").rename(tmp_path / "summary.json")
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"half a line')
    text = report(folder)
    assert "`evaluation`: evaluation, ended. " in text and text.count("\n### ") == 10 and "avg@2" not in text
    (folder / "results.jsonl").unlink()
    (tmp_path / "summary.json").rename(folder / "summary.json")
    text = report(folder)
    # One of 12 problems has 0.5 instead of 1: 11.5 / 12. A resample has it at most 3 times with 98 %: 10.5 / 12.
    assert "* `avg@2` is 0.9583 [0.875, 1] over 12 prompts of sums" in text
    assert "| sums | avg@2 | 0.9583 [0.875, 1] | 12 |" in text
    (folder / "summary.json").write_text('{"by_data_source": {"s": 3}}')
    assert "avg@2" not in report(folder)


def test_evolution_has_its_intervals_and_solutions(tmp_path: Path) -> None:
    folder = write_evolution(tmp_path / "evolution")
    for name, content in (("18", '{"problem": 5'), ("19", '{"problem": 6, "candidates": [{"key": 3}]}')):
        (folder / f"problems/0000{name}.json").write_text(content)
    (folder / "metrics.jsonl").unlink()
    tracker = JsonlTracker(folder / "metrics.jsonl", 0)
    for number, value in ((1, 0.25), (2, 0.5)):
        bounds = {"accuracy/chosen/low": value - 0.125, "accuracy/chosen/high": value + 0.125}
        tracker.log(number, {"accuracy/chosen": value, "cost/tokens": 600.0} | bounds)
    tracker.close()
    text = report(folder)
    assert "| `accuracy/chosen` | 0.25 [0.125, 0.375] | 1 | 0.5 [0.375, 0.625] | 2 |" in text
    assert "### 1. Prompt 17 of sums: improved" in text
    assert re.search(r"Iteration 0, reward 0:\n`15\n`\nIteration 1, reward 1:\n`14\n`", text)
    assert "| tokens of model calls | 1,200 |" in text


def test_failed_samples_are_counted_by_reason(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "rollouts/step_000003.jsonl").read_text().splitlines()]
    lines[0] |= {"outcome": "grader_failed", "reason": "no server", "reward": None}
    (run / "rollouts/step_000003.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report(run)
    assert "| training, grader_failed: no server | 1 |" in text and "sums: without reward" in text
    assert "Iteration 3, no reward (no server)" in text
    with lock_folder(run):
        assert "`first`: RL, running (process " in report(run)


def test_damaged_and_empty_folders_are_shown_with_their_gaps(run: Path, tmp_path: Path) -> None:
    (run / "config.yaml").write_text("a: [")
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "val/accuracy": 0.5}\nnot json\n\xff\n{"step": 2, "val/acc')
    (run / "rollouts/step_000002.jsonl").write_bytes(b'{"prompt_id": 1}\n[]\n3\n\xff\xfe\n')
    (run / "rollouts/val_000001.jsonl").write_bytes(b"")
    (run / "plan.json").write_text('{"settings": [1]')
    with pytest.raises(RuntimeError), record_in_history(run):
        raise RuntimeError("no <memory> left")
    text = report(run)
    for gap in ("config.yaml is damaged", "metrics.jsonl has 2 damaged", "step_000002.jsonl has 4 damaged"):
        assert gap in text
    assert "failed (no <memory> left)" in text
    for name in ("metrics.jsonl", "results.jsonl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
        assert "No metrics." in report(tmp_path / name)


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "outputs/first")
    output = tmp_path / "report.html"

    def fail(*words: object) -> str:
        assert main(["report", *map(str, words)]) == 2
        assert not output.exists()
        return capsys.readouterr().err

    error = fail(tmp_path / "outputs", "-o", output)
    assert f"{tmp_path}/outputs is no run" in error and f"runs in it: {folder}." in error
    assert "runs in it: none." in fail(tmp_path / "gone", "-o", output)
    error = fail(folder, "-o", tmp_path / "a.doc")
    assert "a.doc" in error and ".html" in error
    assert "No such file or directory" in fail(folder, "-o", tmp_path / "gone/report.html")
    assert main(["report", str(folder), "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"written: {output}\n" and output.read_text().startswith("<!doctype html>")


def test_inputs_are_compared_by_their_content(tmp_path: Path) -> None:
    first, second, data = tmp_path / "first", tmp_path / "second", tmp_path / "train.jsonl"
    for folder in (first, second):
        data.write_text(f"rows of {folder.name}")
        write_run(folder)
        inputs = {"data.train_files": [(str(data), digest_file(data))], "model.path": [("org/model", "0abc")]}
        write_run_plan(folder, RunPlan({}, inputs=inputs))
    texts = report(first), report(second), report(first, second)
    digest = digest_file(data)[:12]
    assert digest not in texts[0] and f"`{digest}`" in texts[1] and "0abc" in texts[1]
    assert "data.train_files (content)" in texts[2] and "model.path (content)" not in texts[2]


def test_changes_between_the_starts_of_a_run(run: Path) -> None:
    for number, values in ((2, "{seed: 0}"), (10, "{seed: 5, total_training_steps: 12}")):
        (run / f"config.{number}.yaml").write_text(f"actor_rollout_ref: {{model: {{path: m}}}}\ntrainer: {values}\n")
    text = report(run)
    assert "| `trainer.total_training_steps` | config.2.yaml | `9` | `-` |" in text
    assert "| `trainer.seed` | config.10.yaml | `0` | `5` |" in text and "3 of 12 iterations" in text
