"""Resume a run folder with a damaged checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st

from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config
from alphaapollo.runs.checkpoint_folder import MANIFEST, PROGRESS, CheckpointFolder, write_progress
from alphaapollo.runs.resume import find_start_point
from alphaapollo.session.progress import Progress

HOW = ["flip", "cut", "empty", "grow", "remove", "rename", "swap", "json"]


@dataclass(frozen=True)
class Damage:
    how: str
    file: str
    at: float  # of the file's length
    step: int

    def apply(self, folder: Path) -> None:
        path = folder / f"step_{self.step:06d}"
        file = path / self.file
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
damages = st.builds(Damage, st.sampled_from(HOW), st.sampled_from(FILES), st.floats(0, 1), st.sampled_from([2, 4]))


def make_run(folder: Path) -> Config:
    """Make two checkpoints like those of a run of four steps."""
    config = Config(trainer={"output_dir": str(folder), "project_name": "p", "experiment_name": "e"})
    run = config.trainer.folder
    save_config(config, run / "config.yaml")
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    checkpoints = CheckpointFolder(run / "checkpoints", keep=None)
    for step in (2, 4):
        writing = checkpoints.begin_checkpoint(step)
        (writing / "policy" / "model").mkdir(parents=True)
        (writing / "policy" / "model" / "__0_0.distcp").write_bytes(bytes([step]) * 300)
        (writing / "policy" / "state.json").write_text(json.dumps({"world_size": 1, "step": step}))
        torch.save({"torch": torch.get_rng_state()[:64], "step": step}, writing / "policy" / "rank_0.pt")
        write_progress(writing, {"step": step})
        checkpoints.complete_checkpoint(writing)
    return config


def resume_after(config: Config, damage: Damage) -> str:
    """Check that the start resumes from an undamaged checkpoint or not at all, then restore the run of `make_run`."""
    folder = config.trainer.folder / "checkpoints"
    backup = folder.with_name("backup")
    shutil.copytree(folder, backup)
    try:
        damage.apply(folder)
        return _start(config, damage, backup)
    finally:
        shutil.rmtree(folder)
        backup.rename(folder)


def _start(config: Config, damage: Damage, undamaged: Path) -> str:
    start = find_start_point(config)
    assert start.checkpoint is not None, "starts from scratch although an undamaged checkpoint exists"
    assert Progress.read(start.checkpoint).step == start.step
    assert _files(start.checkpoint) == _files(undamaged / start.checkpoint.name), "resumed from a damaged checkpoint"
    return "resumes" if start.step == 4 else "resumes from the previous checkpoint"


def _files(checkpoint: Path) -> dict[str, bytes]:
    """Content of all files except the manifest, which may lose its last newline without damage."""
    files = [file for file in checkpoint.rglob("*") if file.is_file() and file.name != MANIFEST]
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in files}
