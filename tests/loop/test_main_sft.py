"""Supervised fine-tuning end to end: one process, two ranks under torchrun, resume, export."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.loop.conftest import ROOT, Finished, Task
from tests.loop.warm import Program

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]


def sft(task: Task, out: Path, *overrides: str, ranks: int = 1, name: str = "sft") -> Finished:
    """A run to its end: several ranks start as a user's do."""
    words = [
        f"data.train_files={task.data / 'sft.parquet'}",
        f"model.path={task.model}",
        "data.train_batch_size=8",
        "optim.lr=1e-3",
        "trainer.log_freq=1",
        "trainer.cpu_threads=1",
        f"trainer.output_dir={out}",
        "trainer.project_name=test",
        f"trainer.experiment_name={name}",
        *overrides,
    ]
    module, several = "alphaapollo.trainer.main_sft", ["--standalone", f"--nproc_per_node={ranks}", "-m"]
    command = (module, words) if ranks == 1 else ("torch.distributed.run", [*several, module, *words])
    program = Program(*command, out / "output.txt", dict(os.environ), ROOT, warm=ranks == 1)
    code = program.wait(200)
    if code is None:
        program.signal(signal.SIGKILL)
        pytest.fail(f"not done within 200 s:\n{program.printed[-4000:]}")
    return Finished(code, program.printed, out / "test" / name)


def test_loss_falls_and_the_model_loads(task: Task, tmp_path: Path) -> None:
    val = f"data.val_files={task.data / 'sft.parquet'}"
    done = sft(task, tmp_path, val, "trainer.total_training_steps=8", "trainer.test_freq=4")
    assert done.code == 0, done.output[-3000:]
    lines = done.metrics
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert lines[3]["val/loss"] > lines[7]["val/loss"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(tmp_path / "test/sft/model")
    AutoTokenizer.from_pretrained(tmp_path / "test/sft/model")


def test_two_ranks_give_the_losses_of_one(task: Task, tmp_path: Path) -> None:
    words = ["trainer.total_training_steps=4", "trainer.export_hf=False"]
    alone = sft(task, tmp_path, *words, name="alone")
    for name, more in (("own_rows", []), ("shared_rows", ["ulysses_sequence_parallel_size=2"])):
        both = sft(task, tmp_path, *words, *more, ranks=2, name=name)
        assert both.code == 0, both.output[-3000:]
        for one, two in zip(alone.metrics, both.metrics, strict=True):
            assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4)
            assert two["train/tokens"] == one["train/tokens"]


def test_resumed_run_ends_like_the_whole_one(task: Task, tmp_path: Path) -> None:
    schedule = ["trainer.save_freq=3", "optim.lr_warmup_steps=2"]
    sft(task, tmp_path, *schedule, "trainer.total_training_steps=6", name="whole")
    sft(task, tmp_path, *schedule, "trainer.total_training_steps=3", name="parts")
    done = sft(task, tmp_path, *schedule, "trainer.total_training_steps=6", name="parts")
    assert done.code == 0, done.output[-3000:]
    assert [line["step"] for line in done.metrics] == [1, 2, 3, 4, 5, 6]
    whole, parts = ((tmp_path / "test" / name / "model/model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    model = tmp_path / "test/parts/model"
    before = model.stat().st_mtime_ns
    again = sft(task, tmp_path, *schedule, "trainer.total_training_steps=6", name="parts", ranks=2)
    assert again.code == 0 and again.output.count("already complete: all 6 iterations are done") == 1
    assert model.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.max_length=8", "longer than data.max_length"),
        ("data.messages_key=chat", "needs a column"),
        ("optim.learning_rate=1", "optim.lr"),
        ("model.path=/no/such/model", "no such folder"),
    ],
)
def test_refused(task: Task, tmp_path: Path, override: str, says: str) -> None:
    done = sft(task, tmp_path, override)
    assert done.code == 2
    assert says in done.output and "Traceback" not in done.output, done.output
