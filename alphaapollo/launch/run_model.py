"""A run's newest model, and how it is played: for what works with a run after it (serve, chat)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaapollo.launch.checkpoint_folder import PROGRESS, CheckpointFolder
from alphaapollo.launch.resume import read_saved

LENGTHS = ("max_prompt_length", "max_response_length", "apply_chat_template_kwargs")


@dataclass(frozen=True)
class NewestModel:
    """Whole weights that transformers and vLLM load."""

    run: Path  # the model's own folder, where no run is known
    folder: Path
    checkpoint: Path | None = None  # to be exported to `folder` first; None: the model is there


def find_newest(path: Path) -> NewestModel:
    """Of a run, of one of its checkpoints, or a model's folder itself.

    ValueError: there is no such folder, or neither a model nor a whole checkpoint in it; says how one comes to be.
    """
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder. Give a run's, e.g. outputs/alphaapollo/default, or a model's.")
    if is_model(path):
        return NewestModel(_home(path), path)
    whole = [path] if (path / PROGRESS).is_file() else CheckpointFolder(path / "checkpoints", keep=None).whole()
    if not whole:
        return _written_at_the_end(path)
    checkpoint, model = whole[-1], path / "model"
    written = checkpoint / PROGRESS  # without it the checkpoint is damaged, as its export says
    if is_model(model) and written.is_file() and model.stat().st_mtime >= written.stat().st_mtime:
        return NewestModel(path, model)
    run = checkpoint.parents[1]
    exported = run / "exported" / checkpoint.name
    return NewestModel(run, exported, None if is_model(exported) else checkpoint)


def is_model(folder: Path) -> bool:
    """It holds whole weights, not adapters alone."""
    return (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file()


def _written_at_the_end(run: Path) -> NewestModel:
    model = run / "model"
    if is_model(model):
        return NewestModel(run, model)
    if (model / "adapter_config.json").is_file():
        raise ValueError(
            f"{model} holds adapters alone (trainer.export_lora=adapter), and there is no checkpoint to merge them "
            "from. Merge them with peft, or run again with trainer.export_lora=merged."
        )
    raise ValueError(
        f"{run} has no model yet, and no whole checkpoint. A run writes checkpoints every trainer.save_freq iterations "
        "and its model at the end (trainer.export_hf): give the command again that began it, or name another folder."
    )


def _home(model: Path) -> Path:
    """The run that wrote the model, where its folder says so."""
    for run in (model.parent, model.parents[1]):
        if (run / "config.yaml").is_file() and model.parent.name in (run.name, "exported"):
            return run
    return model


def settings_to_play(newest: NewestModel) -> dict[str, Any]:
    """The values of a GenerationConfig with which the model plays as in its run: its engine, environment, tools and
    lengths. Nobody grades, nobody trains beside it."""
    known = newest.run != newest.folder and (newest.run / "config.yaml").is_file()
    saved = read_saved(newest.run) if known else {}
    role, data = saved.get("actor_rollout_ref", saved), saved.get("data", {})
    alone = {"num_engines": 1, "router_replay": False, "lora": "merged"}
    rollout = {name: value for name, value in role.get("rollout", {}).items() if name != "gpu_memory_utilization"}
    whole = {"path": str(newest.folder), "tokenizer_path": "", "lora_rank": 0, "lora_alpha": None}
    return {
        "model": role.get("model", {}) | whole,
        "rollout": rollout | alone,
        "env": saved.get("env", {}),
        "data": {name: data[name] for name in LENGTHS if name in data},
        "trainer": {"controller": "local"},
    }
