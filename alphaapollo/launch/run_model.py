"""Newest model of a run and its generation settings, for `serve` and `chat`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import format_override
from alphaapollo.config.load import drop_unknown_keys, load_config
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.config.schema.model import Lora
from alphaapollo.launch.checkpoint_folder import PROGRESS, CheckpointFolder
from alphaapollo.launch.resume import read_saved
from alphaapollo.rewards.grader_processes.protocol import make_worker_environment

LENGTHS = ("max_prompt_length", "max_response_length", "apply_chat_template_kwargs")


@dataclass(frozen=True)
class RunModel:
    """Location of complete weights that transformers and vLLM can load."""

    run: Path  # folder of the run; the model's folder if the run is unknown
    folder: Path
    checkpoint: Path | None = None  # checkpoint to export to `folder` first; None: the model exists


def find_newest(path: Path) -> RunModel:
    """Return the newest model of a run folder, a checkpoint or a model folder.

    Raises ValueError if there is no such folder, or if it has neither a model nor a complete checkpoint.
    """
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder. Use the folder of a run, e.g. outputs/alphaapollo/default, or of a model."
        )
    if is_model(path):
        return RunModel(_find_run(path), path)
    completed = (
        [path] if (path / PROGRESS).is_file() else CheckpointFolder(path / "checkpoints", keep=None).list_completed()
    )
    if not completed:
        return _find_final_model(path)
    checkpoint, model = completed[-1], path / "model"
    written = checkpoint / PROGRESS  # without it the checkpoint is damaged, which the export reports
    if is_model(model) and written.is_file() and model.stat().st_mtime >= written.stat().st_mtime:
        return RunModel(path, model)
    run = checkpoint.parents[1]
    exported = run / "exported" / checkpoint.name
    return RunModel(run, exported, None if is_model(exported) else checkpoint)


def is_model(folder: Path) -> bool:
    """Return whether the folder has complete weights, not only adapters."""
    return (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file()


def _find_final_model(run: Path) -> RunModel:
    model = run / "model"
    if is_model(model):
        return RunModel(run, model)
    if (model / "adapter_config.json").is_file():
        raise ValueError(
            f"{model} has only adapters (trainer.export_lora=adapter), and there is no checkpoint to merge them from. "
            "Merge them with peft, or run again with trainer.export_lora=merged."
        )
    raise ValueError(
        f"{run} has no model and no complete checkpoint yet. A run writes checkpoints every trainer.save_freq "
        "iterations and its model at the end (trainer.export_hf). Run its command again, or use another folder."
    )


def _find_run(model: Path) -> Path:
    """Return the folder of the run that wrote the model, or the model's folder if the run is unknown."""
    for run in (model.parent, model.parents[1]):
        if (run / "config.yaml").is_file() and model.parent.name in (run.name, "exported"):
            return run
    return model


def make_generation_values(newest: RunModel) -> dict[str, Any]:
    """Return values of a GenerationConfig with the run's engine, environment, tools and lengths, without graders."""
    is_known = newest.run != newest.folder and (newest.run / "config.yaml").is_file()
    saved = read_saved(newest.run) if is_known else {}
    role, data = saved.get("actor_rollout_ref", saved), saved.get("data", {})
    alone = {"num_engines": 1, "router_replay": False, "lora": "merged"}
    rollout = {name: value for name, value in role.get("rollout", {}).items() if name != "gpu_memory_utilization"}
    merged = {"path": str(newest.folder), "tokenizer_path": ""} | Lora().model_dump()  # adapters are merged
    values = {
        "model": role.get("model", {}) | merged,
        "rollout": rollout | alone,
        "env": saved.get("env", {}),
        "data": {name: data[name] for name in LENGTHS if name in data},
        "trainer": {"controller": "local"},
    }
    return drop_unknown_keys(GenerationConfig, values)


def load_run_model(run: str, words: Sequence[str]) -> tuple[RunModel, GenerationConfig]:
    """Return the newest model of a run (exported if necessary) and its settings with the user's KEY=VALUE overrides.
    Raises ConfigError if there is no model, the export fails, or a key is invalid."""
    try:
        newest = find_newest(Path(run))
        values = make_generation_values(newest)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(values, file, allow_unicode=True)
        file.flush()
        config = load_config(GenerationConfig, "generation", ["--config", file.name, *words])
    export_newest(newest)
    return newest, config


def export_newest(newest: RunModel) -> None:
    """Export a checkpoint in a subprocess. Raises ConfigError if that fails."""
    if newest.checkpoint is None:
        return
    keys = [format_override("checkpoint", str(newest.checkpoint)), format_override("output", str(newest.folder))]
    command = [sys.executable, "-m", "alphaapollo.trainer.main_export", *keys]
    if subprocess.run(command, env=make_worker_environment(), check=False).returncode:
        raise ConfigError(f"{newest.checkpoint} could not be exported (see above).")
