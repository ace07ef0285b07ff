"""trainer.planned_device: a dry run plans for GPUs that this machine does not have, and suggests settings that fit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from alphaapollo.cli.main import main
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.planned_device import GPUS, get_planned_gpu_memory
from alphaapollo.controller.placement import make_planned_machine
from examples.quickstart.make_task import make_tokenizer
from tests.builders import write_rows

Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]
PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
GIB = 2**30
ASK, ANSWER = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
ROW = {
    "data_source": "openai/gsm8k", "prompt": [ASK], "reward_model": {"ground_truth": "2"},
    "messages": [ASK, ANSWER], "chosen": [ANSWER], "rejected": [ASK | {"role": "assistant"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with data, and with models that have a configuration and a tokenizer, but no weights."""
    folder = tmp_path_factory.mktemp("planned")
    for name in ("qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b"):
        make_tokenizer(folder / name)
        shutil.copy(PUBLISHED / name / "config.json", folder / name)
    write_rows(folder / "data.jsonl", [ROW] * 40)
    return folder


def dry_run(command: str, model: str, *words: str) -> int:
    key = "actor_rollout_ref.model.path" if command == "rl" else "model.path"
    try:
        return main([command, "data.train_files=data.jsonl", f"{key}={model}", "trainer.dry_run=true", *words])
    except SystemExit as end:
        return int(str(end.code))


def test_memory_of_gpus():
    assert get_planned_gpu_memory("H100") == GPUS["h100"].mib * 2**20
    assert get_planned_gpu_memory("24GiB") == 24 * GIB and get_planned_gpu_memory("79.5 gib") == 79.5 * GIB
    for wrong in ("h1000", "0GiB", "24", "24GB"):
        with pytest.raises(ValueError, match=r"Set one of a100, .* e.g. 24GiB"):
            get_planned_gpu_memory(wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.dry_run=false"], "needs trainer.dry_run=true"),
        (["trainer.planned_device=b100"], "trainer.planned_device=b100: the GPU is unknown. Set one of a100, "),
        (["trainer.planned_device=", "trainer.device=cuda"], "trainer.planned_device=h100 to plan for GPUs"),
    ],
)
def test_the_key_is_never_ignored(words: list[str], message: str, folder: Path, monkeypatch: Patch, capsys: Captured):
    monkeypatch.chdir(folder)
    given = {"trainer.planned_device": "trainer.planned_device=h100"} | {word.partition("=")[0]: word for word in words}
    assert dry_run("rl", "qwen2.5-0.5b", *given.values()) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("keys", "num_gpus"), [((), 8), (("colocate=false",), 12), (("nnodes=1",), 8)])
def test_a_node_has_the_gpus_that_the_keys_need(keys: tuple[str, ...], num_gpus: int):
    words = [f"actor_rollout_ref.rollout.{key}" for key in keys] + ["actor_rollout_ref.rollout.num_engines=8"]
    planned = ["trainer.dry_run=true", "trainer.planned_device=l4", "trainer.n_gpus_per_node=8", "trainer.nnodes=2"]
    machine = make_planned_machine(load_config(Config, "ppo", [*words, *planned]))
    assert (machine.num_gpus, machine.gpu_memory, machine.memory) == (num_gpus, 23034 * 2**20, 0)


@pytest.mark.parametrize("command", ["rl", "sft", "dpo", "rm"])
def test_every_training_command_plans(command: str, folder: Path, monkeypatch: Patch, capsys: Captured):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # it is not contacted
    monkeypatch.setenv("COLUMNS", "200")
    words = ["trainer.planned_device=h200", "trainer.n_gpus_per_node=8", "trainer.nnodes=2"]
    assert dry_run(command, "qwen2.5-7b", *words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^planned for +GPUs of 140.4 GiB \(h200\)", printed, re.MULTILINE)
    assert "GiB on a GPU of 140 GiB" in printed and "model.dtype=bfloat16" in printed
    assert "2, each over 8 ranks (HSDP)" in printed
    assert "each rank receives 53.3 GB per micro-batch" in printed  # 8 x 7.6 G x 7 / 8


@pytest.mark.parametrize(
    ("command", "model", "words", "key"),
    [
        ("rl", "qwen2.5-7b", ["trainer.planned_device=h100", "algorithm=grpo"], "fsdp_config.offload_policy=true"),
        ("rl", "qwen2.5-32b", ["trainer.planned_device=h100", "trainer.n_gpus_per_node=8"], "tensor_model_parallel"),
        ("sft", "qwen2.5-7b", ["trainer.planned_device=24GiB"], "model.lora_rank=32"),
        ("sft", "qwen2.5-7b", ["trainer.planned_device=h100", "trainer.n_gpus_per_node=4",
                               "fsdp_config.fsdp_size=1"], "fsdp_config.fsdp_size=-1"),
    ],
)  # fmt: skip
def test_suggested_settings_fit(
    command: str, model: str, words: list[str], key: str, folder: Path, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    assert dry_run(command, model, *words) == 2
    (found,) = re.findall(r"It fits with (.*) \(docs", " ".join(capsys.readouterr().err.split()))
    assert key in found
    for settings in found.split("; or with "):
        more = settings.split(", ")
        changed = [word for word in words if word.partition("=")[0] not in {one.partition("=")[0] for one in more}]
        assert dry_run(command, model, *changed, *more) == 0, settings
        assert "memory: about" not in capsys.readouterr().out, settings


def test_a_model_that_is_too_large_gets_no_keys(folder: Path, monkeypatch: Patch, capsys: Captured):
    monkeypatch.chdir(folder)
    assert dry_run("rl", "qwen2.5-32b", "trainer.planned_device=4GiB") == 2
    error = capsys.readouterr().err
    assert "16 nodes are not enough. Use a smaller model, or devices with more memory." in error
    assert "offload_policy=true" not in error
