"""A run's folder with a damaged checkpoint, as the next start finds it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st

from alphaapollo.checkpoint_folder import MANIFEST, PROGRESS, CheckpointFolder, write_progress
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config
from alphaapollo.models.checkpoint_reader import read_generators
from alphaapollo.startup.resume import find_start
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.resume_rule import change_rule_of

HOW = ["flip", "cut", "empty", "grow", "remove", "rename", "swap", "json"]


@dataclass(frozen=True)
class Damage:
    how: str
    file: str
    at: float  # of the file's length
    step: int
    manifest: bool  # else written before there were manifests

    def apply(self, folder: Path) -> None:
        path = folder / f"step_{self.step:06d}"
        file = path / self.file
        if not self.manifest:
            for one in folder.glob(f"*/{MANIFEST}"):
                one.unlink()
        if not file.exists():
            return
        data, at = file.read_bytes(), int(self.at * (file.stat().st_size - 1))
        match self.how:
            case "flip":
                file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            case "cut":
                file.write_bytes(data[:at])
            case "empty":
                file.write_bytes(b"")
            case "grow":
                file.write_bytes(data + b"\0")
            case "remove":
                file.unlink()
            case "rename":
                file.rename(file.with_name("other"))
            case "swap":
                other = folder / f"step_{6 - self.step:06d}" / self.file
                shutil.copy(other, file)
            case "json":
                file.write_text(json.dumps([None, {"step": "x"}, 7][at % 3]))


FILES = [PROGRESS, MANIFEST, "policy/state.json", "policy/rank_0.pt", "policy/model/__0_0.distcp"]
damages = st.builds(
    Damage, st.sampled_from(HOW), st.sampled_from(FILES), st.floats(0, 1), st.sampled_from([2, 4]), st.booleans()
)


def make_run(folder: Path) -> Config:
    """Two checkpoints, as a run of four steps leaves them."""
    config = Config(trainer={"output_dir": str(folder), "project_name": "p", "experiment_name": "e"})
    run = config.trainer.folder
    save_config(config, run / "config.yaml")
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    checkpoints = CheckpointFolder(run / "checkpoints", keep=None)
    for step in (2, 4):
        writing = checkpoints.begin(step)
        (writing / "policy" / "model").mkdir(parents=True)
        (writing / "policy" / "model" / "__0_0.distcp").write_bytes(bytes([step]) * 300)
        (writing / "policy" / "state.json").write_text(json.dumps({"world_size": 1, "step": step}))
        torch.save({"torch": torch.get_rng_state()[:64], "step": step}, writing / "policy" / "rank_0.pt")
        write_progress(writing, {"step": step})
        checkpoints.finish(writing)
    return config


def start_again(config: Config, damage: Damage) -> str:
    """Where it goes on from is sound, or nothing is gone on from. The run is as `make_run` made it afterwards."""
    folder = config.trainer.folder / "checkpoints"
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    try:
        damage.apply(folder)
        return _start(config, damage)
    finally:
        shutil.rmtree(folder)
        kept.rename(folder)


def _start(config: Config, damage: Damage) -> str:
    start = find_start(config, change_rule_of(config))
    if start.checkpoint is None:
        return "begins anew"
    progress = Progress.read(start.checkpoint)
    assert progress.step == start.step and isinstance(start.step, int)
    touched = start.checkpoint.name == f"step_{damage.step:06d}"
    if damage.manifest:
        assert (start.checkpoint / PROGRESS).exists()
        if touched and damage.file != MANIFEST:
            assert _bytes(start.checkpoint) == _bytes_of_sound(start.step), "damaged, and gone on from"
        return "goes on" if touched or damage.step == 2 else "goes on from the one before"
    if touched and damage.file.endswith(".pt"):
        read = start.checkpoint / damage.file
        try:
            read_generators(read)
        except Exception as error:  # noqa: BLE001 worded by models/checkpoint.py
            return f"without a manifest: {type(error).__name__}"
    return "goes on without a manifest"


def _bytes(checkpoint: Path) -> bytes:
    return (checkpoint / "policy" / "model" / "__0_0.distcp").read_bytes()


def _bytes_of_sound(step: int) -> bytes:
    return bytes([step]) * 300
