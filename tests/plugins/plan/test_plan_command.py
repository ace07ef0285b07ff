"""`alphaapollo plan`: the plan of one training, and a table of several."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from alphaapollo.cli.main import main
from examples.quickstart.make_task import make_tokenizer
from tests.builders import write_rows

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
MODEL, ENGINE = "actor_rollout_ref.model.path=model", "actor_rollout_ref.rollout.tensor_model_parallel_size"
WORDS = ["plan", MODEL, "data.train_files=rows.jsonl", "trainer.planned_device=h100", "trainer.n_gpus_per_node=8"]
ROW = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1="}]}


@pytest.fixture
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    make_tokenizer(Path("model"))
    shutil.copy(PUBLISHED / "qwen2.5-14b" / "config.json", "model")
    write_rows(Path("rows.jsonl"), [ROW | {"reward_model": {"ground_truth": "2"}}] * 40)


@pytest.mark.usefixtures("_in_folder")
def test_one_plan_is_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "trainer.dry_run=false"]) == 0
    printed = capsys.readouterr().out
    for row in ("KV cache +[0-9,]+ tokens per engine: ", "time +[0-9.,]+ to [0-9.,]+ s per", "disk ", "driver memory"):
        assert re.search(f"^{row}", printed, re.MULTILINE), row
    assert "nothing was started" in printed and not Path("outputs").exists()


@pytest.mark.usefixtures("_in_folder")
def test_candidates_are_compared_and_long_answers_need_larger_engines(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["algorithm=grpo", "data.max_prompt_length=1024", "data.max_response_length=31000", "trainer.nnodes=2"]
    assert main([*WORDS, *long]) == 0
    printed = capsys.readouterr().out
    assert f"It fits with {ENGINE}=2 (docs" in printed  # and not with more nodes
    assert "micro-batch" in printed and "or one longer example of up to 32024" in printed
    assert "algorithm=grpo sets actor_rollout_ref.actor.kl_loss_coef=0.04, unusual for answers" in printed
    assert main([*WORDS, *long, f"{ENGINE}=1", "vs", f"{ENGINE}=2", "vs", "trainer.nnodes=0"]) == 0
    table, errors = capsys.readouterr()
    rows = [re.split("  +", line.strip()) for line in table.splitlines()[-4:]]
    assert [row[0] for row in rows] == ["candidate", "(as given)", f"{ENGINE}=2", "trainer.nnodes=0"]
    assert [row[1] for row in rows] == ["fits", "no", "yes", "error"] and "trainer.nnodes: expected" in errors
    assert int(rows[1][4]) < int(rows[2][4]) and " to " in rows[2][6]


@pytest.mark.usefixtures("_in_folder")
def test_a_candidate_without_keys_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "vs"]) == 2 and "Write KEY=VALUE after each vs." in capsys.readouterr().err
