"""Preference and reward model training end to end: learning, resume, ranks, and bad input."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from alphaapollo.runs.training_examples import read_examples
from examples.preferences.make_pairs import main as make_pairs
from tests.loop.conftest import DEADLINE, ROOT, FinishedRun, Task
from tests.loop.warm import Program


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of right and wrong sums from examples/preferences."""
    folder = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make_pairs", "--out", str(folder), "--num_train", "48", "--num_val", "24"])
        make_pairs()
    return folder / "data"


def words_of(task: Task, pairs: Path, out: Path, *overrides: str, name: str = "run") -> list[object]:
    """Arguments of main_dpo or main_rm."""
    return [
        f"data.train_files={pairs / 'pairs.parquet'}",
        f"data.val_files={pairs / 'val_pairs.parquet'}",
        f"model.path={task.model}",
        "data.train_batch_size=16",
        "data.max_token_len_per_gpu=1000",
        "optim.lr=1e-3",
        "trainer.log_freq=1",
        "trainer.test_freq=3",
        "trainer.total_training_steps=6",
        "trainer.cpu_threads=1",
        f"trainer.output_dir={out}",
        "trainer.project_name=test",
        f"trainer.experiment_name={name}",
        *overrides,
    ]


def tune(command: str, task: Task, pairs: Path, out: Path, *overrides: str, name: str = "run") -> FinishedRun:
    """Run main_dpo or main_rm to the end."""
    words = words_of(task, pairs, out, *overrides, name=name)
    program = Program(f"alphaapollo.trainer.{command}", words, out / "output.txt", dict(os.environ), ROOT, warm=True)
    code = program.wait(DEADLINE)
    if code is None:
        program.signal(signal.SIGKILL)
        pytest.fail(f"not done within 240 s:\n{program.printed[-4000:]}")
    return FinishedRun(code, program.printed, out / "test" / name)


def weights(run: FinishedRun) -> bytes:
    return (run.folder / "model/model.safetensors").read_bytes()


@pytest.mark.core
def test_pairs_are_learned_and_resume_equals_uninterrupted_run(task: Task, pairs: Path, tmp_path: Path) -> None:
    """The reference's log-probs are computed once; if lost, they are recomputed with the initial model, not
    with that of the checkpoint."""
    keys = ["trainer.save_freq=2", "preference.beta=0.5"]
    whole = tune("main_dpo", task, pairs, tmp_path, *keys, name="whole")
    assert whole.code == 0, whole.output[-4000:]
    lines = whole.metrics
    assert lines[0]["train/margin"] == pytest.approx(0.0, abs=1e-4), "policy and reference begin as one"
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert lines[-1]["val/reward_chosen"] > lines[-1]["val/reward_rejected"]
    (step,) = (line for line in whole.output.splitlines() if line.startswith("step 6/6"))
    for metric in ("train/accuracy", "train/margin", "val/accuracy", "val/margin"):
        assert f"{metric.split('/')[1]} {lines[-1][metric]:.3f}" in step, metric
        assert metric == "train/margin" or f"\n{metric} " in whole.output, "val/margin is summarized instead"
    assert sum(name.startswith("val/accuracy/carries_") for name in lines[-1]) == 3
    for pair in read_examples(whole.folder):
        assert [row.label for row in pair.rows] == ["chosen", "rejected"] and pair.data_source.startswith("carries_")
        assert all(row.ref_logp is not None and row.ref_logp < 0 for row in pair.rows)

    def go_on(steps: int) -> FinishedRun:
        done = tune("main_dpo", task, pairs, tmp_path, *keys, f"trainer.total_training_steps={steps}", name="parts")
        assert done.code == 0, done.output[-4000:]
        return done

    go_on(2)
    kept = tmp_path / "test/parts/reference.npz"
    before = kept.stat().st_mtime_ns
    go_on(4)
    assert kept.stat().st_mtime_ns == before
    kept.write_bytes(b"PK damaged")
    parts = go_on(6)  # computes the reference log-probs again
    assert kept.read_bytes() != b"PK damaged"
    assert weights(whole) == weights(parts)
    assert [line["train/loss"] for line in parts.metrics] == [line["train/loss"] for line in whole.metrics]


@pytest.mark.nightly
def test_two_ranks_equal_one(task: Task, pairs: Path, tmp_path: Path) -> None:
    """KTO, with its KL estimate over the batch of both ranks."""
    keys = ["preference.loss=kto", "trainer.total_training_steps=3", "trainer.export_hf=False"]
    alone = tune("main_dpo", task, pairs, tmp_path, *keys, name="alone")
    both = tune("main_dpo", task, pairs, tmp_path, *keys, "trainer.n_gpus_per_node=2", name="both")
    assert both.code == 0, both.output[-4000:]
    for one, two in zip(alone.metrics, both.metrics, strict=True):
        for name in ("train/loss", "train/reward_chosen", "train/kl", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert alone.metrics[-1]["val/accuracy"] == both.metrics[-1]["val/accuracy"]


@pytest.mark.core
def test_reward_model_is_trained_and_loaded(task: Task, pairs: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    done = tune("main_rm", task, pairs, tmp_path)
    assert done.code == 0, done.output[-4000:]
    lines = done.metrics
    assert lines[0]["train/loss"] == pytest.approx(0.693, abs=0.03) and lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert sum(name.startswith("val/accuracy/carries_") for name in lines[-1]) == 3
    model = AutoModelForSequenceClassification.from_pretrained(done.folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(done.folder / "model")
    import pandas as pd

    chosen = []
    for row in pd.read_parquet(pairs / "val_pairs.parquet").itertuples():
        ids = tokenizer.apply_chat_template([*row.prompt, *row.chosen], return_tensors="pt", return_dict=False)
        with torch.no_grad():
            chosen.append(model(ids).logits.item())
    assert sum(chosen) / len(chosen) == pytest.approx(lines[-1]["val/score_chosen"], abs=1e-4)
