"""Export of a checkpoint, written by any number of ranks, as a Hugging Face folder, in one process without GPU.

prepare: find the checkpoint, its run and its model  ->  write: load its parameters into the model, save it, compare it
with plain transformers, and write a model card
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alphaapollo.config.check import check_config
from alphaapollo.config.load import convert_values, drop_unknown_keys
from alphaapollo.config.schema import Critic, ExportConfig, LoraForm, Model
from alphaapollo.launch.builders import make_critic_model
from alphaapollo.launch.checkpoint_folder import PROGRESS, CheckpointFolder, find_damage, read_progress
from alphaapollo.launch.model_card import format_model_card
from alphaapollo.launch.push_to_hub import check_push
from alphaapollo.launch.resume import read_saved

if TYPE_CHECKING:
    from alphaapollo.models.export.verification import Kind


@dataclass(frozen=True)
class ExportPlan:
    """An export that has not started."""

    checkpoint: Path
    weights: Path  # of the checkpoint's model
    kind: Kind
    model: Model  # that the run began with
    saved: dict[str, Any]  # the run's configuration
    dtype: Literal["float32", "bfloat16"]
    output: Path
    form: LoraForm
    push_to: str  # hub repository; empty: none


def prepare(config: ExportConfig) -> ExportPlan:
    """ValueError: the checkpoint, the run's configuration, its model or the hub token is missing."""
    from alphaapollo.models.load import load_config

    check_config(config)
    if config.push_to:
        check_push(config.push_to)
    checkpoint = _find_checkpoint(Path(config.checkpoint).expanduser().resolve())
    run = checkpoint.parents[1]
    saved = read_saved(run)
    model = _read_model(saved, run, config)
    kind: Kind = "reward model" if "bradley_terry" in saved else config.role
    weights = _find_weights(checkpoint, kind)
    own = str(getattr(load_config(model), "dtype", "")).removeprefix("torch.")
    asked = next(name for name in (config.dtype, model.dtype, own, "float32") if name in ("float32", "bfloat16"))
    name = f"{checkpoint.name}_critic" if kind == "critic" else checkpoint.name
    output = Path(config.output).expanduser().absolute() if config.output else run / "exported" / name
    if output.exists():
        raise ValueError(f"output={output} already exists. Set another folder, or remove it.")
    if config.export_lora == "adapter" and not model.lora_rank:
        raise ValueError(f"export_lora=adapter needs a LoRA run, and {run} was trained without LoRA. Leave it out.")
    if config.export_lora == "adapter" and kind != "policy":
        raise ValueError(
            f"export_lora=adapter works for policies, and {run} trained a {kind} with its head. Leave it out."
        )
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if asked == "bfloat16" else "float32"
    return ExportPlan(checkpoint, weights, kind, model, saved, dtype, output, config.export_lora, config.push_to)


def write(export: ExportPlan) -> str:
    """Write the folder, and rename it to its final name after plain transformers has loaded it and computed the same
    outputs. Returns the result of the comparison as a sentence.

    Raises:
        ValueError: the model cannot be loaded, the checkpoint belongs to another model, or the outputs differ.
        OSError: the folder cannot be written.
    """
    import torch

    from alphaapollo.models.export.verification import OUTPUT_NAMES
    from alphaapollo.workers.export import export_checkpoint

    export.output.parent.mkdir(parents=True, exist_ok=True)
    unverified = export.output.with_name(f".unverified_{export.output.name}")
    shutil.rmtree(unverified, ignore_errors=True)
    dtype: torch.dtype = getattr(torch, export.dtype)
    try:
        gap = export_checkpoint(str(export.weights), export.model, dtype, str(unverified), export.form, export.kind)
        proof = (
            f"Plain transformers loads this folder; its {OUTPUT_NAMES[export.kind]} of a probe differ from the checkpoint's "
            f"by {gap:.1e} on average (weights in {export.dtype})."
        )
        step, run = int(read_progress(export.checkpoint)["step"]), export.checkpoint.parents[1]
        card = format_model_card(export.saved, run, step, export.kind, export.model.path, proof)
        (unverified / "README.md").write_text(card, encoding="utf-8")
        unverified.rename(export.output)
    finally:
        shutil.rmtree(unverified, ignore_errors=True)
    return proof


def _find_weights(checkpoint: Path, kind: Kind) -> Path:
    names = ("critic",) if kind == "critic" else ("policy", "model")
    found = next((checkpoint / name for name in names if (checkpoint / name / "state.json").is_file()), None)
    if found is None and kind == "critic":
        raise ValueError(
            f"role=critic: {checkpoint} has no critic, because its algorithm needs no values. Leave it out."
        )
    if found is None:
        raise ValueError(
            f"{checkpoint} has no policy and no model. Give a checkpoint of main_ppo or of a fine-tuning run."
        )
    return found


def _find_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest one of a run."""
    written = (
        [path] if (path / PROGRESS).is_file() else CheckpointFolder(path / "checkpoints", keep=None).list_completed()
    )
    if not written:
        raise ValueError(
            f"checkpoint={path} is neither a complete checkpoint (it has no {PROGRESS}) nor a run that has one. Give a "
            "folder <run>/checkpoints/step_N, or a run."
        )
    if problems := find_damage(written[-1]):
        raise ValueError(f"{written[-1]} is damaged: {', '.join(problems)}. Give another checkpoint.")
    return written[-1]


def _read_model(saved: dict[str, Any], run: Path, asked: ExportConfig) -> Model:
    """The section of the policy or the fine-tuned model. The other sections may be of another version."""
    role = saved.get("actor_rollout_ref", saved)
    if not isinstance(role, dict) or not isinstance(role.get("model"), dict):
        raise ValueError(
            f"{run} has no config.yaml of main_ppo or of a fine-tuning run, which names its model. Export another run."
        )
    model = convert_values(Model, drop_unknown_keys(Model, role["model"]))
    if asked.role == "critic" and isinstance(saved.get("critic"), dict):
        model = make_critic_model(model, convert_values(Critic, drop_unknown_keys(Critic, saved["critic"])))
    return model.model_copy(update={"path": asked.model_path}) if asked.model_path else model
