"""Evaluation suites: results of lm-eval and inspect-ai are read, and every failure has a reason and no score."""

from __future__ import annotations

import asyncio
import json
from os.path import expanduser
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Machine
from alphaapollo.observability.console import Console
from alphaapollo.plugins.suites.command import find_results_folder
from alphaapollo.plugins.suites.kinds import InspectSuite, LmEvalSuite, ProgramSuite
from alphaapollo.rollout import suites
from alphaapollo.rollout.suites import Suite, SuiteScore, make_suites
from alphaapollo.runs.newest_model import RunModel
from alphaapollo.trainer.setup.preparation import RlPreparation
from tests.processes import is_running, wait_until

SERVER = suites.ModelServer("http://127.0.0.1:9/v1", "secret", "policy", "models/tiny", 512)
INSPECT_SUITE = InspectSuite("inspect:sums.py@hard")
LM_EVAL = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "sample_len": 4,
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.125,
            "exact_match,flexible-extract": 0.5,
            "exact_match_stderr,flexible-extract": "N/A",
        },
        "reasoning": {"alias": "reasoning", "name": "reasoning"},  # a group without a metric of its own
        "mmlu": {"alias": "mmlu", "sample_len": 30, "acc,none": 0.75, "acc_stderr,none": 0.05},
    },
    "groups": {"mmlu": {"alias": "mmlu", "sample_len": 30, "acc,none": 0.75, "acc_stderr,none": 0.05}},
}
MATCH = {"accuracy": {"value": 0.25}, "stderr": {"value": 0.125}}
INSPECT = {
    "status": "success",
    "eval": {"task": "package/sums"},
    "results": {
        "completed_samples": 5,
        "scores": [{"name": "match", "scored_samples": 4, "metrics": MATCH}],
    },
}


def write(folder: Path, name: str, content: Any) -> Path:
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / name).write_text(json.dumps(content))
    return folder


def test_suite_is_parsed() -> None:
    suite: ProgramSuite = LmEvalSuite("lm-eval:gsm8k --limit 10 --gen_kwargs 'stop=[\"a b\"]'")
    assert (suite.name, suite.task) == ("gsm8k", "gsm8k")
    assert suite.options == ["--limit", "10", "--gen_kwargs", 'stop=["a b"]']
    suite = InspectSuite("inspect:'my tasks/sums.py@hard' -T n=3")
    assert (suite.name, suite.task, suite.options) == ("hard", "my tasks/sums.py@hard", ["-T", "n=3"])
    assert InspectSuite("inspect:~/a.py@b").task == expanduser("~/a.py@b")
    assert InspectSuite("inspect:tasks/sums.py").name == "sums"
    assert InspectSuite("inspect:inspect_evals/gsm8k").name == "gsm8k"


@pytest.mark.parametrize("text", ["gsm8k", "lm_eval:gsm8k", "lm-eval:", "inspect: ", ""])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Write lm-eval:TASK or inspect"):
        make_suites([text])


def test_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "sums.py").touch()
    script = """[ "$2" = "import inspect_ai; import os; assert os.path.isfile('sums.py')" ]"""
    make_suite(tmp_path, script, "inspect:sums.py@sums").check()
    with pytest.raises(ValueError, match=r"'inspect:products\.py@sums'"):
        make_suite(tmp_path, script, "inspect:products.py@sums").check()


def test_scores_of_inspect(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", "log.json", INSPECT)
    assert list(INSPECT_SUITE.read_scores(folder)) == [SuiteScore("sums", "accuracy", 0.25, 0.125, 4)]
    several = json.loads(json.dumps(INSPECT))
    several["results"]["scores"].append({"name": "f1", "scored_samples": 5, "metrics": {"mean": {"value": 0.5}}})
    folder = write(tmp_path / "two", "log.json", several)
    assert [(score.metric, score.rows) for score in INSPECT_SUITE.read_scores(folder)] == [
        ("match/accuracy", 4),
        ("f1/mean", 5),
    ]


@pytest.mark.parametrize(
    ("log", "reason"),
    [({"status": "error", "error": {"message": "APIError"}}, "APIError"), ({"status": "cancelled"}, "cancelled")],
)
def test_failed_inspect_run_has_its_reason(tmp_path: Path, log: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        list(INSPECT_SUITE.read_scores(write(tmp_path, "log.json", INSPECT | log | {"results": None})))


def test_commands_send_requests_to_the_server() -> None:
    words = LmEvalSuite("lm-eval:gsm8k").make_command(SERVER, Path("out"))
    assert "base_url=http://127.0.0.1:9/v1/completions" in words and "max_length=512" in words
    words = INSPECT_SUITE.make_command(SERVER, Path("out"))
    assert "openai-api/alphaapollo/policy" in words and "http://127.0.0.1:9/v1" in words


def make_suite(folder: Path, script: str, text: str = "lm-eval:gsm8k", timeout: float = 60.0) -> Suite:
    """A suite with a shell script instead of its Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    kind = LmEvalSuite if text.startswith("lm-eval:") else InspectSuite
    return kind(text, str(python), timeout, folder)


def run(tmp_path: Path, *arguments: Any, **options: Any) -> Any:
    suite = make_suite(tmp_path, *arguments, **options)
    result = asyncio.run(suites.run_suite(suite, SERVER, tmp_path / "run/suites/step_3/gsm8k"))
    assert suites.read_suite_results(tmp_path / "run") == [result]
    return result


def test_result_is_written(tmp_path: Path) -> None:
    (tmp_path / "results_1.json").write_text(json.dumps(LM_EVAL))
    files = tmp_path / "run/suites/step_3/gsm8k" / suites.FILES
    result = run(tmp_path, f'echo "key $OPENAI_API_KEY"; cp results_1.json {files}')
    assert (result.name, result.model, result.error) == ("gsm8k", "step_3", "")
    assert result.scores == [
        SuiteScore("gsm8k", "exact_match/strict-match", 0.25, 0.125, 4),
        SuiteScore("gsm8k", "exact_match/flexible-extract", 0.5, None, 4),
        SuiteScore("mmlu", "acc", 0.75, 0.05, 30),
    ]
    assert (files.parent / "log.txt").read_text() == "key secret\n"
    assert result.metrics == {
        "val/suite/gsm8k/exact_match/strict-match": 0.25,
        "val/suite/gsm8k/exact_match/flexible-extract": 0.5,
        "val/suite/mmlu/acc": 0.75,
        "val/suite/gsm8k/failed": 0.0,
    }


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo start; echo ClientConnectorError: refused; echo end; exit 3", "3: ClientConnectorError: refused"),
        ("kill -9 $$", "exit code -9"),
        ("true", "0 files results_*.json"),
        ("echo '{' > FILES/results_1.json", "property name"),
        ('echo \'{"results": {"gsm8k": {"acc,none": NaN, "sample_len": 1}}}\' > FILES/results_1.json', "finite"),
    ],
)
def test_failure_has_a_reason_and_no_score(tmp_path: Path, script: str, reason: str) -> None:
    result = run(tmp_path, script.replace("FILES", str(tmp_path / "run/suites/step_3/gsm8k" / suites.FILES)))
    assert reason in result.error and "log.txt" in result.error
    assert result.scores == [] and result.metrics == {"val/suite/gsm8k/failed": 1.0}


def test_suite_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    result = run(tmp_path, "sleep 1000 & echo $! > pid; wait", timeout=1.0)
    assert "it did not end within 1 s" in result.error
    child = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_running(child)), "the suite's process still runs"


def test_missing_python_and_package_and_equal_names_are_errors(tmp_path: Path) -> None:
    suite = LmEvalSuite("lm-eval:gsm8k", str(tmp_path / "nothing"), 60.0, tmp_path)
    assert "No such file" in asyncio.run(suites.run_suite(suite, SERVER, tmp_path / "run/suites/model/gsm8k")).error
    with pytest.raises(ValueError, match="package lm-eval"):
        make_suites(["lm-eval:gsm8k"], "/bin/false")
    with pytest.raises(ValueError, match="two suites are named gsm8k"):
        make_suites(["lm-eval:gsm8k", "lm-eval:gsm8k --num_fewshot 5"], "/bin/true")


def test_name_that_lm_eval_does_not_know_is_an_error(tmp_path: Path) -> None:
    """The script is lm-eval with one task in its package, and one in the folder own."""
    (tmp_path / "own").mkdir()
    script = (
        '[ "$1" = -c ] || [ "$3 $4 $5" = "validate --tasks sums" ] || '
        '[ "$3 $4 $5 $6" = "validate --tasks more --include_path=own" ]'
    )
    known = ("sums", "more --include_path own", "more --include_path=own", "a.yaml", "sums_*", "own")
    for task in known:
        make_suite(tmp_path, script, f"lm-eval:{task}").check()
    for task in ("sum", "more", "own_tasks --include_path own"):
        with pytest.raises(ValueError, match=f"'lm-eval:{task}"):
            make_suite(tmp_path, script, f"lm-eval:{task}").check()


@pytest.mark.parametrize("python", ["/bin/true", "/bin/false"])
def test_a_run_checks_its_suites_with_suite_python(tmp_path: Path, python: str) -> None:
    trainer = {"val_suites": ["lm-eval:gsm8k"], "suite_python": python, "suite_timeout": 9, "test_freq": 1}
    data = {"train_files": str(tmp_path / "rows.jsonl")}
    (tmp_path / "rows.jsonl").touch()
    role = {"model": {"path": "some/model"}}
    config = Config.model_validate({"trainer": trainer, "data": data, "actor_rollout_ref": role})
    preparation = RlPreparation(config, Console())
    preparation.machine = Machine(8, 0)
    if python == "/bin/false":
        with pytest.raises(ValueError, match="'lm-eval:gsm8k' cannot run"):
            preparation.check_config()
    else:
        preparation.check_config()
        assert [(suite.python, suite.timeout) for suite in preparation.val_suites] == [(python, 9.0)]


@pytest.mark.parametrize(
    ("run_folder", "model", "folder"),
    [
        ("outputs/me/run", "outputs/me/run/model", "outputs/me/run/suites/model"),
        ("/models/Qwen3", "/models/Qwen3", "outputs/suites/Qwen3"),  # a model of no run, which may be read-only
    ],
)
def test_results_are_never_written_into_a_models_folder(run_folder: str, model: str, folder: str) -> None:
    assert find_results_folder(RunModel(Path(run_folder), Path(model))) == Path(folder)
