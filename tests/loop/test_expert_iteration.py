"""One round of docs/sft.md with its commands: generate, keep the correct answers, fine-tune on them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from alphaapollo.data.files import read_rows
from examples.data_preprocess import prepare_right_answers
from tests.loop.conftest import Task
from tests.loop.stack import OnStack
from tests.loop.test_main_generation import GenerationOnStack
from tests.loop.test_main_sft import SftRunner

LIKES_SHORT = '''
def compute_score(prompt, completion):
    """Accept completions that ended early, which some of an untrained model's do."""
    return float(len(completion) < 100)
'''


class SftOnStack(OnStack, SftRunner):
    """Runs main_sft on the stack."""


def test_fine_tuning_on_correct_generations(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generation = GenerationOnStack(task, tmp_path)
    generation.reward.write_text(LIKES_SHORT)
    words = ("rollout.name=hf", "data.max_response_length=128", "rollout.max_num_seqs=256")
    done = generation.run(*words, name="round_1")

    said, folder = str(done.folder / "results.jsonl"), tmp_path / "right"
    monkeypatch.setattr(sys, "argv", ["prepare", "--results", said, "--shortest", "--local_dir", str(folder)])
    prepare_right_answers.main()
    assert "dropped: wrong" in capsys.readouterr().out
    rows = read_rows(folder / "train.parquet")
    assert len(rows) >= 8 and all(row["messages"][-1]["role"] == "assistant" for row in rows)

    words = (f"data.train_files={folder / 'train.parquet'}", "trainer.total_training_steps=4")
    tuned = SftOnStack(task, tmp_path).run(*words, name="sft_1")
    assert tuned.metrics[-1]["train/loss"] < tuned.metrics[0]["train/loss"]
    assert (tuned.folder / "model" / "config.json").exists()
