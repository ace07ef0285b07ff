"""main_eval on existing outputs, in this process."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from alphaapollo.config.build import build_config
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import EvalConfig, GenerationConfig
from alphaapollo.runs.resume import read_saved_config
from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.trainer.evaluation.scoring import read_problems
from alphaapollo.trainer.main_eval import main
from alphaapollo.types import Prompt
from tests.builders import make_group, make_trajectory, make_turn
from tests.builders import write_rows as write

RESPONSES = {
    "7+5=?": ("12", ["#### 12", "I think 12", "\\boxed{13}", "no idea"]),
    "9*9=?": ("81", ["81", "80", "80", "81.0"]),
}


def question(text: str, truth: str, source: str = "openai/gsm8k") -> dict:
    prompt = [{"role": "user", "content": text}]
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}}


def rows() -> list[dict]:
    return [{**question(text, truth), "responses": own} for text, (truth, own) in RESPONSES.items()]


def run(folder: Path, path: str, *overrides: str) -> int:
    return main([f"data.path={path}", f"trainer.output_dir={folder}/out", *overrides])


def summary(folder: Path) -> dict:
    return json.loads((folder / "out/alphaapollo/eval/summary.json").read_text())


def figures(folder: Path) -> dict[str, float]:
    return {name: figure["value"] for name, figure in summary(folder)["all"]["figures"].items()}


def scores(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out/alphaapollo/eval/scores.jsonl").read_bytes().splitlines()]


EXPECTED = {
    "avg@4": (2 / 4 + 2 / 4) / 2,
    "pass@1": 1 / 2,
    "pass@2": 1 - (2 * 1) / (4 * 3),
    "pass@3": 1.0,
    "pass@4": 1.0,
    "maj@4": (1 + 1 / 2) / 2,  # 12 has two votes of four; 81 and 80 have two each
    "reward": 1 / 2,
}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_lists_of_responses(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, write(tmp_path / f"rows.{suffix}", rows())) == 0
    assert figures(tmp_path) == pytest.approx(EXPECTED)
    assert summary(tmp_path)["all"]["figures"]["avg@4"]["problems"] == 2
    saved = build_config(EvalConfig, read_saved_config(tmp_path / "out/alphaapollo/eval"))
    assert saved.trainer.output_dir == f"{tmp_path}/out"
    records = scores(tmp_path)
    assert [divmod(index, 4) for index in range(8)] == [(one["prompt_id"], one["sample"]) for one in records]
    assert [record["reward"] for record in records] == [1, 1, 0, 0, 1, 0, 0, 1]
    assert [record["outcome"] for record in records] == ["scored"] * 3 + ["wrong_format"] + ["scored"] * 4
    assert records[0]["answer"] == "12" and records[0]["response"] == "#### 12"
    printed = capsys.readouterr().out
    assert "8 responses to 2 problems" in printed and "7 scored, 1 wrong format" in printed
    table = csv.DictReader((tmp_path / "out/alphaapollo/eval/summary.csv").read_text().splitlines())
    assert [row["figure"] for row in table] == list(EXPECTED)


def test_one_row_per_response_gives_the_same(tmp_path: Path) -> None:
    given = [(question(text, truth), own) for text, (truth, own) in RESPONSES.items()]
    flat = [{**row, "response": response} for row, own in given for response in own]
    assert run(tmp_path, write(tmp_path / "flat.jsonl", flat)) == 0
    assert figures(tmp_path) == pytest.approx(EXPECTED)


def test_equal_prompts_are_graded_with_their_own_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = tmp_path / "letters.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth=None, extra_info=None):\n"
        "    return float(solution_str[0] == extra_info['letter'])\n"
    )
    given = [{"prompt": "A word.", "letter": word[0], "response": word} for word in ("apple", "ant", "bee", "cat")]
    for path in (write(tmp_path / "rows.jsonl", given), str(tmp_path / "out/alphaapollo/eval/scores.jsonl")):
        assert run(tmp_path, path, f"custom_reward_function.path={reward}") == 0
        assert figures(tmp_path)["reward"] == 1.0
        assert "4 responses to 3 problems" in (printed := capsys.readouterr().out)
        assert "equal prompts with other columns" in printed


def test_what_main_generation_wrote_is_scored_again(tmp_path: Path) -> None:
    prompt = Prompt(4, "openai/gsm8k", [{"role": "user", "content": "7+5=?"}], "12")
    texts = enumerate(RESPONSES["7+5=?"][1])
    samples = [make_trajectory(make_turn(1, text=text), score=0.0, sample=i, prompt_id=4) for i, text in texts]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(format_trajectory_lines(0, [make_group(*samples, prompt=prompt)])))
    for column in ("data.response_key=text", "data.response_key=''"):
        assert run(tmp_path, str(path), column) == 0
        assert figures(tmp_path)["avg@4"] == 0.5
    samples.append(make_trajectory(sample=4))
    path.write_text("".join(format_trajectory_lines(0, [make_group(*samples, prompt=prompt)])))
    save_config(GenerationConfig(), tmp_path / "config.yaml")
    for entry in (f"{tmp_path}/*.jsonl", str(tmp_path)):
        assert run(tmp_path, entry) == 0
    assert summary(tmp_path)["all"]["outcomes"]["environment_failed"] == 1


@pytest.mark.parametrize(
    ("responses", "failed"),
    [(["#### 12", None], 1), ([], 1), (None, 1), ([None, None, "12"], 2), (float("nan"), 1), ([""], 0)],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_missing_response_is_a_failed_sample(tmp_path: Path, responses, failed: int, suffix: str, capsys) -> None:
    if suffix == "parquet" and not isinstance(responses, list | None):
        responses = None
    given = [{**question("7+5=?", "12"), "responses": responses}, {**question("1+1=?", "2"), "responses": ["2"]}]
    assert run(tmp_path, write(tmp_path / f"rows.{suffix}", given)) == 0
    everything = summary(tmp_path)["all"]
    assert everything["failed"] == everything["outcomes"].get("environment_failed", 0) == failed
    records = scores(tmp_path)
    assert [one["reward"] for one in records if one["response"] is None] == [None] * failed
    assert ("responses are missing" in capsys.readouterr().out) == bool(failed)


def test_problems_are_told_apart_by_prompt_source_and_truth(tmp_path: Path) -> None:
    one = {**question("1+1=?", "2"), "response": "2"}
    others = [
        {**one, "data_source": "gsm8k/other"},
        {**one, "reward_model": {"style": "rule", "ground_truth": "3"}},
        {**one, "prompt": [{"role": "user", "content": "1+2=?"}]},
    ]
    files = [write(tmp_path / "a.jsonl", [one, *others]), write(tmp_path / "b.jsonl", [one, one])]
    problems = read_problems(files, "prompt", "", [])
    assert [(problem.prompt.id, len(problem.responses)) for problem in problems] == [(0, 3), (1, 1), (2, 1), (3, 1)]


def test_ones_own_function_and_its_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text(
        "def length(prompt, completion):\n    assert completion != '80', 'I hate 80'\n    return {'accuracy': 1.0}\n"
    )
    path = write(tmp_path / "rows.jsonl", rows())
    own = [f"custom_reward_function.path={tmp_path}/reward.py", "custom_reward_function.name=length"]
    assert run(tmp_path, path, *own) == 0
    everything = summary(tmp_path)["all"]
    assert everything["outcomes"] == {"scored": 6, "grader_failed": 2} and everything["failed"] == 2
    assert everything["figures"]["avg@4"]["value"] == 1.0
    assert everything["figures"]["pass@3"]["problems"] == 1
    assert [record["reward"] for record in scores(tmp_path)] == [1, 1, 1, 1, 1, None, None, 1]
    assert "I hate 80" in capsys.readouterr().out

    (tmp_path / "reward.py").write_text("def length(prompt, completion):\n    raise OSError('gone')\n")
    assert run(tmp_path, path, *own) == 2, "it is tried before the start"
    assert "reward.py: length fails on 5 of 5" in capsys.readouterr().err
    own_answers = [response for _, responses in RESPONSES.values() for response in responses]
    passes_a_try = f"if completion in {own_answers}:\n        raise OSError('gone')\n    return 0.0\n"
    (tmp_path / "reward.py").write_text(f"def length(prompt, completion):\n    {passes_a_try}")
    assert run(tmp_path, path, *own) == 1
    error = capsys.readouterr().err
    assert "All 8 samples failed" in error and "prompt 0, sample 0: grader_failed: " in error and "gone" in error


@pytest.mark.parametrize(
    ("change", "overrides", "says"),
    [
        ({}, ["data.path=/no/such/file.jsonl"], "no such file: /no/such/file.jsonl"),
        ({}, ["data.response_key=answer"], "no column 'answer'"),
        ({}, ["data.prompt_key=question"], "no column 'question'"),
        ({"data_source": "my/own"}, [], "data_source 'my/own'"),
        ({"reward_model": None}, [], "1 of 2 prompts have no ground truth"),
        ({"responses": ["a", 1]}, [], "row 0: 'responses' is ['a', 1]"),
        ({"responses": {"a": "b"}}, [], "row 0: 'responses' is {'a': 'b'}"),
        ({}, ["data.n_samples=2"], "data.n_samples (got 2): a key of main_generation"),
    ],
)
def test_invalid_value_is_refused(
    tmp_path: Path, change: dict, overrides: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = rows()
    path = write(tmp_path / "rows.jsonl", [{**first, **change}, *others])
    try:
        code = run(tmp_path, path, *overrides)
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert code == 2 and says in error, error
    assert not (tmp_path / "out").exists()


def test_another_commands_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "out/alphaapollo/eval/config.yaml"
    save_config(GenerationConfig(), config)
    assert run(tmp_path, write(tmp_path / "rows.jsonl", rows())) == 2
    error = capsys.readouterr().err
    assert "main_generation" in error and "trainer.experiment_name" in error
    assert [file.name for file in config.parent.iterdir()] == ["config.yaml"]
