"""Folders of other trainers and damaged folders, as the checks before the start of every command see them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from alphaapollo.config.check import find_path_errors
from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.data.vocabulary import find_model_file, load_tokenizer
from alphaapollo.models.load import load_config
from alphaapollo.runs.input_digests import compute_input_digests
from alphaapollo.runs.newest_model import find_newest_model

MODEL = ["config.json", "model.safetensors"]
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
        if name.endswith(".safetensors"):
            save_file({"a": np.zeros(9)}, folder / name)


def find_error(path: Path) -> str:
    return " ".join(find_path_errors(SftConfig(model={"path": str(path)}, data={"train_files": os.devnull})))


VERL = ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt", "huggingface/config.json")


@pytest.mark.parametrize(
    ("files", "path", "hint"),
    [
        ([f"ck/global_step_{n}/actor/{name}" for n in (20, 100) for name in VERL], "ck", "ck/global_step_100/actor."),
        ([f"actor/{name}" for name in VERL], "actor/huggingface", "Set the folder with its shards, {}/actor."),
        (
            ["z/config.json", "z/zero_to_fp32.py", "z/training_args.bin"],
            "z",
            "python {0}/z/zero_to_fp32.py {0}/z {0}/z",
        ),
        (["dcp/iter_1/__0_0.distcp"], "dcp", "torch.distributed in {}/dcp/iter_1."),
    ],
)
def test_checkpoints_of_other_trainers_are_named(tmp_path: Path, files: list[str], path: str, hint: str) -> None:
    write(tmp_path, *files)
    assert hint.format(tmp_path) in find_error(tmp_path / path)
    with pytest.raises(ValueError, match=r"checkpoint|DeepSpeed"):
        find_newest_model(tmp_path / path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    write(tmp_path, *MODEL)
    assert find_error(tmp_path) == ""
    weights = tmp_path / "model.safetensors"
    complete = weights.read_bytes()
    for content in (complete[:-1], complete[:20], b"", complete + b"x", b"\xff" * 100):
        weights.write_bytes(content)
        assert find_error(tmp_path).startswith(f"model.path: {weights} is truncated or damaged (")
    with pytest.raises(ValueError, match="truncated"):
        find_newest_model(tmp_path)
    weights.write_text(LFS)
    assert "model.safetensors is a pointer of Git LFS" in find_error(tmp_path)
    weights.write_bytes(complete)
    (tmp_path / "tokenizer.json").write_text(LFS)
    assert "tokenizer.json is a pointer of Git LFS" in find_error(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-00002-of-00002.safetensors." in find_error(tmp_path)


DEEP = '{"a": ' + "[" * 200 + "]" * 200 + "}"
INDEX = json.dumps({"weight_map": {"a": "/dev/zero", "b": "../b.safetensors"}})
HOSTILE = {
    "chat_template.jinja": os.mkfifo,
    "vocab.json": lambda file: os.symlink("/dev/zero", file),
    "tokenizer.json": lambda file: (file.touch(), os.truncate(file, 1 << 30)),
    "config.json": lambda file: file.write_text('{"text_config": {"num_hidden_layers": 1000000000}}'),
    "tokenizer_config.json": lambda file: file.write_text(DEEP),
    "model.safetensors.index.json": lambda file: file.write_text(INDEX),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_must_not_be_read_are_named(tmp_path: Path, name: str) -> None:
    """No reader waits for a pipe, reads a device or fails with RecursionError, also without the check of paths."""
    file = tmp_path / "m" / name
    write(tmp_path / "m", *MODEL)
    file.parent.mkdir(exist_ok=True)
    HOSTILE[name](file)
    assert str(file) in find_error(tmp_path / "m")
    path = str(tmp_path / "m")
    for read in (
        load_tokenizer,
        lambda path: find_model_file(path, MODEL[0]),
        lambda path: load_config(Model(path=path)),
    ):
        with pytest.raises(ValueError, match=re.escape(str(file))):
            read(path)


def test_odd_names_are_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path / "m", *MODEL)
    (tmp_path / "m/extra.json").mkdir()
    (tmp_path / "m/loop").symlink_to(".")
    (tmp_path / "m/gone.json").symlink_to("nowhere")
    assert find_error(tmp_path / "m") == ""
    config = SftConfig(model={"path": str(tmp_path / "m")}, data={"train_files": os.devnull})
    digests = compute_input_digests(config)["model.path"]
    assert [Path(file).name for file, _ in digests] == MODEL
