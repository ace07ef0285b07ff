"""Data of another command are refused with a command that works on them."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.cli.main import main
from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.types import Prompt
from examples.quickstart.make_task import make_model, make_tokenizer
from tests.builders import make_group, make_trajectory, make_turn, write_rows

ASK = {"role": "user", "content": "1+1="}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("2", "3"))
PAIRS = [{"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]}]
LABELS = [{"prompt": f"{n}+1=", "completion": f"{n + label}", "label": bool(label)} for n in (1, 2) for label in (0, 1)]
ANSWERS = [make_trajectory(make_turn(2, text=text), score=score) for text, score in ((r"\boxed{2}", 1.0), ("3", 0.0))]
GROUP = make_group(*ANSWERS, prompt=Prompt(2, "sums", [ASK], "2"))
RESULTS = [json.loads(line) for line in format_trajectory_lines(0, [GROUP])]
TASKS = [{"data_source": "openai/gsm8k", "prompt": [ASK], "reward_model": {"ground_truth": "2"}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    make_model(folder, seed=0)
    return folder


def check(words: list[str], model: Path, folder: Path) -> int:
    """Exit code of a dry run."""
    more = [f"model.path={model}", f"trainer.output_dir={folder}", "trainer.dry_run=true"]
    if words[0] == "rl":
        more[0] = f"actor_rollout_ref.{more[0]}"
        more += ["data.max_prompt_length=64", "data.max_response_length=64"]
    return main([*words, *more])


@pytest.mark.parametrize(
    ("command", "rows", "suggested"),
    [
        ("sft", PAIRS, "alphaapollo dpo data.train_files="),
        ("rl", [{"chosen": "1+1= 2", "rejected": "1+1= 3"}], "alphaapollo dpo data.train_files="),
        ("dpo", LABELS, "alphaapollo dpo preference.loss=kto data.train_files="),
        ("rl", [{"text": "1+1=2"}], "alphaapollo sft data.train_files="),
        ("dpo", [{"messages": [ASK, RIGHT]}], "alphaapollo sft data.train_files="),
        ("dpo", TASKS, "alphaapollo rl data.train_files="),
        ("sft", [{"question": "1+1=", "answer": "2"}], "python -m examples.data_preprocess.prepare_sft --data_source="),
        ("sft", RESULTS, "python -m examples.data_preprocess.prepare_sft --data_source="),
        ("dpo", RESULTS, "python -m examples.data_preprocess.prepare_preference --data_source="),
    ],
)
def test_suggested_command_works(
    command: str,
    rows: list[dict[str, Any]],
    suggested: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write_rows(tmp_path / "data.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    assert check([command, f"data.train_files={file}"], model, tmp_path) == 2
    error = capsys.readouterr().err
    (found,) = re.findall(r"To use this file: (.*)", error)
    assert found == f"{suggested}{file}"
    program, *words = shlex.split(found)
    if program == "python":
        monkeypatch.setattr(sys, "argv", words[1:])
        importlib.import_module(words[1]).main()
        (prepared,) = tmp_path.glob("outputs/**/train.parquet")
        words = [command, f"data.train_files={prepared}"]
    assert check(words, model, tmp_path) == 0, capsys.readouterr().err
