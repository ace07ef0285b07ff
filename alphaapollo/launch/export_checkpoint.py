"""A checkpoint, written by any number of ranks, as a Hugging Face folder: one process, no GPU.

prepare: which checkpoint, of which run, of which model  ->  write: its parameters into that model, and out again; the
proof that plain transformers computes the same; a card of what it is
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alphaapollo.config.check import check
from alphaapollo.config.load import convert
from alphaapollo.config.schema import Critic, ExportConfig, LoraForm, Model
from alphaapollo.launch.builders import critic_model
from alphaapollo.launch.checkpoint_folder import PROGRESS, CheckpointFolder, damage, read_progress
from alphaapollo.launch.model_card import model_card
from alphaapollo.launch.push_to_hub import check_push
from alphaapollo.launch.resume import read_saved

if TYPE_CHECKING:
    from alphaapollo.models.export.verification import Kind


@dataclass(frozen=True)
class Export:
    """What will be written; nothing is started."""

    checkpoint: Path
    weights: Path  # of the checkpoint's model
    kind: Kind
    model: Model  # that it began with
    saved: dict[str, Any]  # the run's configuration
    dtype: Literal["float32", "bfloat16"]
    output: Path
    form: LoraForm
    push_to: str  # empty: nowhere


def prepare(config: ExportConfig) -> Export:
    """ValueError: no such checkpoint, its run has no configuration, its model is not there, or nobody is logged in to
    the hub."""
    from alphaapollo.models.load import load_config

    check(config)
    if config.push_to:
        check_push(config.push_to)
    checkpoint = _checkpoint(Path(config.checkpoint).expanduser().resolve())
    run = checkpoint.parents[1]
    saved = read_saved(run)
    model = _model_of(saved, run, config)
    kind: Kind = "reward model" if "bradley_terry" in saved else config.role
    weights = _weights_of(checkpoint, kind)
    own = str(getattr(load_config(model), "dtype", "")).removeprefix("torch.")
    asked = next(name for name in (config.dtype, model.dtype, own, "float32") if name in ("float32", "bfloat16"))
    name = f"{checkpoint.name}_critic" if kind == "critic" else checkpoint.name
    output = Path(config.output).expanduser().absolute() if config.output else run / "exported" / name
    if output.exists():
        raise ValueError(f"output={output} exists already. Give another folder, or remove it.")
    if config.export_lora == "adapter" and not model.lora_rank:
        raise ValueError(f"export_lora=adapter: {run} was trained without LoRA. Leave it out.")
    if config.export_lora == "adapter" and kind != "policy":
        raise ValueError(f"export_lora=adapter: {run}: the head of a {kind} was trained, too. Leave it out.")
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if asked == "bfloat16" else "float32"
    return Export(checkpoint, weights, kind, model, saved, dtype, output, config.export_lora, config.push_to)


def write(export: Export) -> str:
    """Read the checkpoint into the model, write the folder, and prove it: it is there when plain transformers has
    loaded it and computes the same. Returns the proof in words.

    Raises:
        ValueError: the model cannot be loaded, the checkpoint is not of such a model, or the proof failed.
        OSError: the folder cannot be written.
    """
    import torch

    from alphaapollo.models.export.verification import OUTPUTS
    from alphaapollo.workers.export import export_checkpoint

    export.output.parent.mkdir(parents=True, exist_ok=True)
    unproved = export.output.with_name(f".unproved_{export.output.name}")
    shutil.rmtree(unproved, ignore_errors=True)
    dtype: torch.dtype = getattr(torch, export.dtype)
    try:
        gap = export_checkpoint(str(export.weights), export.model, dtype, str(unproved), export.form, export.kind)
        proof = (
            f"Plain transformers loads this folder; its {OUTPUTS[export.kind]} of a probe differ from the checkpoint's "
            f"by {gap:.1e} on average (weights in {export.dtype})."
        )
        step, run = int(read_progress(export.checkpoint)["step"]), export.checkpoint.parents[1]
        card = model_card(export.saved, run, step, export.kind, export.model.path, proof)
        (unproved / "README.md").write_text(card, encoding="utf-8")
        unproved.rename(export.output)
    finally:
        shutil.rmtree(unproved, ignore_errors=True)
    return proof


def _weights_of(checkpoint: Path, kind: Kind) -> Path:
    names = ("critic",) if kind == "critic" else ("policy", "model")
    found = next((checkpoint / name for name in names if (checkpoint / name / "state.json").is_file()), None)
    if found is None and kind == "critic":
        raise ValueError(f"role=critic: {checkpoint} holds none: its algorithm needs no values. Leave it out.")
    if found is None:
        raise ValueError(
            f"{checkpoint} holds no policy and no model. Give a checkpoint of main_ppo or of a fine-tuning."
        )
    return found


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


def _model_of(saved: dict[str, Any], run: Path, asked: ExportConfig) -> Model:
    """The section of the policy, or of the fine-tuned model; the others may be of another version."""
    role = saved.get("actor_rollout_ref", saved)
    if not isinstance(role, dict) or not isinstance(role.get("model"), dict):
        raise ValueError(f"{run} has no config.yaml of main_ppo or main_sft, which says what model it is.")
    model = convert(Model, role["model"])
    if asked.role == "critic" and isinstance(saved.get("critic"), dict):
        model = critic_model(model, convert(Critic, saved["critic"]))
    return model.model_copy(update={"path": asked.model_path}) if asked.model_path else model
