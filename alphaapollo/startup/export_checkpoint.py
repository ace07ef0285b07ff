"""A checkpoint, written by any number of ranks, as a Hugging Face folder: one process, no GPU.

prepare: which checkpoint, of which run, of which model  ->  write: its parameters into that model, and out again
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alphaapollo.checkpoint_folder import PROGRESS, CheckpointFolder, damage
from alphaapollo.config.check import check_export
from alphaapollo.config.load import convert
from alphaapollo.config.schema import ExportConfig, LoraForm, Model
from alphaapollo.startup.resume import read_saved


@dataclass(frozen=True)
class Export:
    """What will be written; nothing is started."""

    weights: Path  # of the checkpoint's model
    model: Model
    dtype: Literal["float32", "bfloat16"]
    output: Path
    form: LoraForm
    scores: bool = False  # a reward model's


def prepare(config: ExportConfig) -> Export:
    """ValueError: no such checkpoint, its run has no configuration, or its model is not there."""
    from alphaapollo.models.load import load_config

    check_export(config)
    checkpoint = _checkpoint(Path(config.checkpoint).expanduser().resolve())
    run = checkpoint.parents[1]
    saved = read_saved(run)
    model, scores = _model_of(saved, run), "bradley_terry" in saved
    if config.model_path:
        model = model.model_copy(update={"path": config.model_path})
    weights = next(
        (checkpoint / name for name in ("policy", "model") if (checkpoint / name / "state.json").is_file()), None
    )
    if weights is None:
        raise ValueError(
            f"{checkpoint} holds no policy and no model. Give a checkpoint of main_ppo or of a fine-tuning."
        )
    own = str(getattr(load_config(model), "dtype", "")).removeprefix("torch.")
    asked = next(name for name in (config.dtype, model.dtype, own, "float32") if name in ("float32", "bfloat16"))
    output = Path(config.output).expanduser() if config.output else run / "exported" / checkpoint.name
    if output.exists():
        raise ValueError(f"output={output} exists already. Give another folder, or remove it.")
    if config.export_lora == "adapter" and not model.lora_rank:
        raise ValueError(f"export_lora=adapter: {run} was trained without LoRA. Leave it out.")
    if config.export_lora == "adapter" and scores:
        raise ValueError(f"export_lora=adapter: {run} is a reward model, whose head was trained, too. Leave it out.")
    return Export(weights, model, "bfloat16" if asked == "bfloat16" else "float32", output, config.export_lora, scores)


def write(export: Export) -> None:
    """Read the checkpoint into the model, and write the folder, whole or not at all.

    Raises:
        ValueError: the model cannot be loaded, or the checkpoint is not of such a model.
        OSError: the folder cannot be written.
    """
    import torch

    from alphaapollo.workers.export import export_checkpoint

    export.output.parent.mkdir(parents=True, exist_ok=True)
    dtype: torch.dtype = getattr(torch, export.dtype)
    export_checkpoint(str(export.weights), export.model, dtype, str(export.output), export.form, export.scores)


def _checkpoint(path: Path) -> Path:
    found = _whole(path)
    if problems := damage(found):
        raise ValueError(f"{found} is damaged: {', '.join(problems)}. Give another checkpoint.")
    return found


def _whole(path: Path) -> Path:
    if (path / PROGRESS).is_file():
        return path
    if whole := CheckpointFolder(path / "checkpoints", keep=None).whole():
        return whole[-1]
    raise ValueError(
        f"checkpoint={path} is no whole checkpoint (no {PROGRESS} in it), and no run that has one. Give a folder "
        "<run>/checkpoints/step_N, or a run."
    )


def _model_of(saved: dict[str, Any], run: Path) -> Model:
    """The section of the policy, or of the fine-tuned model; the others may be of another version."""
    role = saved.get("actor_rollout_ref", saved)
    if not isinstance(role, dict) or not isinstance(role.get("model"), dict):
        raise ValueError(f"{run} has no config.yaml of main_ppo or main_sft, which says what model it is.")
    return convert(Model, role["model"])
