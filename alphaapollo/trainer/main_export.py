"""Export a checkpoint as a Hugging Face folder: `python -m alphaapollo.trainer.main_export checkpoint=<run>`

One process without GPU loads the parameters into the model, saves it, verifies it with plain transformers and writes a
model card. An adapter with its base model, or a checkpoint of verl, is converted to such a folder, and the model of a
run without checkpoints is copied.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alphaapollo.config.build import build_config
from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.errors import ConfigError, exit_on_config_error, report_error
from alphaapollo.config.load import drop_unknown_keys, load_config, refuse_saved_code
from alphaapollo.config.schema import Critic, ExportConfig, LoraForm, Model
from alphaapollo.config.schema.generation import EXPORT_FORMATS
from alphaapollo.processes.entry_point import entry_point, run_program
from alphaapollo.runs.checkpoint_folder import PROGRESS, find_damage, list_checkpoints, read_progress
from alphaapollo.runs.export_format import ExportFormat
from alphaapollo.runs.model_card import format_model_card
from alphaapollo.runs.newest_model import NO_MODEL_HINT, find_newest_model, has_complete_weights
from alphaapollo.runs.resume import read_saved_config
from alphaapollo.utils.hub import check_model_files, find_verl_shards, is_local_path, needs_conversion
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.plugins import find_plugins, load_plugin

if TYPE_CHECKING:
    from alphaapollo.models.export import ModelKind


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Write a checkpoint as a Hugging Face folder, or as a file of a format of plug-ins. Returns 0 if done, 1 if
    failed, 2 if the input is invalid, 130 if interrupted."""
    with exit_on_config_error():
        words = sys.argv[1:] if argv is None else argv
        formats = find_format_words(words)
        config = load_config(ExportConfig, "export", [word for word in words if word.partition("=")[0] not in formats])
        formats |= {name: kind for name in EXPORT_FORMATS if (kind := getattr(config, name))}
        if len(formats) > 1:
            raise ConfigError(f"{' and '.join(formats)} are two formats. Choose one.")
        return export_as_file(config, *formats.popitem()) if formats else export_as_folder(config)


def find_format_words(words: Sequence[str]) -> dict[str, str]:
    """Return {name: type} of the words NAME=TYPE that select a format of a plug-in and are no keys of ExportConfig.
    Raises ConfigError if two packages have the same format."""
    try:
        names = find_plugins("export_formats").keys() - ExportConfig.model_fields.keys()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return {name: kind for name, _, kind in (word.partition("=") for word in words) if name in names}


def export_as_file(config: ExportConfig, name: str, kind: str) -> int:
    """Write the newest model of a run, or the model in a folder, in the format `name` of a plug-in, with weights of the
    type `kind`. Returns the exit code of `main`."""
    from alphaapollo.models.load import load_config as load_model_config

    try:
        export_format: ExportFormat = load_plugin("export_formats", name)
        if kind not in export_format.types:
            raise ValueError(f"{name}={kind}: expected one of {', '.join(export_format.types)}.")
        check, write = export_format.load()
        check(None)  # checks what does not depend on the model
        check_config_and_get_notices(config)
        if config.role == "critic" or config.export_lora == "adapter" or config.dtype != "auto":
            raise ValueError(f"{name}={kind} writes a policy, merged. Remove role, export_lora and dtype.")
        newest = find_newest_model(Path(config.checkpoint))
        is_output_folder = config.output and not config.output.endswith(f".{name}")
        output = f"{config.output}/{newest.run_folder.name}-{kind}.{name}" if is_output_folder else config.output
        default = newest.model_folder.with_name(f"{newest.model_folder.name}-{kind}.{name}")
        file = _find_output(config.model_copy(update={"output": output}), default)
        saved = read_saved_config(newest.run_folder) if (newest.run_folder / "config.yaml").is_file() else {}
        base = str(saved.get("actor_rollout_ref", saved).get("model", {}).get("path", ""))
        if newest.source and base and Path(base).is_dir():  # before the checkpoint is exported
            check(load_model_config(Model(path=base)))
    except ValueError as error:
        return report_error(error, 2)
    if newest.source:
        values = {"checkpoint": str(newest.source), "output": str(newest.model_folder)}
        if exit_code := export_as_folder(config.model_copy(update=values)):
            return exit_code
    try:
        hub_id = "" if is_local_path(base) else base
        print(write(newest.model_folder, file, kind, newest.run_folder.name, hub_id))
    except (ValueError, OSError) as error:
        return report_error(error, 1)
    print(f"model written to {file}")
    return 0


def export_as_folder(config: ExportConfig) -> int:
    """Write a checkpoint, or a model without checkpoint, as a Hugging Face folder. Returns the exit code of `main`."""
    try:
        export = None
        if source := find_model_without_checkpoint(config.checkpoint):
            output = convert_model(config, source)
        else:
            export = prepare_export(config)
            output = export.output
    except (ValueError, OSError) as error:
        return report_error(error, 2 if isinstance(error, ValueError) else 1)
    try:
        if export:
            print(f"{export.weights_folder} in {export.dtype} -> {output}")
            print(write_export(export))
    except (ValueError, OSError) as error:
        return report_error(error, 1)
    print(f"model written to {output}")
    return 0


@dataclass(frozen=True)
class ExportPlan:
    """Checked settings of an export that has not started."""

    checkpoint: Path
    weights_folder: Path  # folder with the model's weights in the checkpoint
    kind: ModelKind
    model: Model  # model section with the base model of the run
    run_config: JsonObject  # saved configuration of the run, as plain values
    dtype: str  # float32 or bfloat16
    output: Path
    export_lora: LoraForm


def find_model_without_checkpoint(checkpoint: str) -> Path | None:
    """Return the model that is exported instead of a checkpoint: an adapter, a checkpoint of verl, or the model of a
    run that wrote no checkpoint. None: there is no such model."""
    path = Path(checkpoint).expanduser().resolve()
    model = path if needs_conversion(path) else path / "model"
    exists = needs_conversion(model) or has_complete_weights(model)
    return model if checkpoint and exists and (model == path or not list_checkpoints(path)) else None


def convert_model(config: ExportConfig, source: Path) -> Path:
    """Write the Hugging Face folder of a model without checkpoint (find_model_without_checkpoint). Returns it."""
    from alphaapollo.models.export import write_converted_model, write_merged_model, write_verl_model

    check_config_and_get_notices(config)
    if config.role == "critic" or config.export_lora == "adapter":
        key = "role=critic" if config.role == "critic" else "export_lora=adapter"
        raise ValueError(f"checkpoint={config.checkpoint} has no checkpoint of a run, only a model. Remove {key}.")
    check_model_files(source)
    trusts_code, shards = bool(config.trust_remote_code), find_verl_shards(source)
    is_complete = has_complete_weights(source)
    output = _find_output(config, source.parent / "exported/model" if is_complete else Path(f"{source}_merged"))
    with _rename_when_complete(output) as folder:
        if shards:
            write_verl_model(shards, folder, config.dtype, trusts_code)
        elif is_complete:
            write_converted_model(source, folder, config.dtype, trusts_code)
        else:
            write_merged_model(source, folder, config.dtype, config.model_path, trusts_code)
    return output


@contextmanager
def _rename_when_complete(output: Path) -> Iterator[Path]:
    """Context manager that yields a folder to write. At the end, it is renamed to `output`; after an error, removed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.with_name(f".unverified_{output.name}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare_export(config: ExportConfig) -> ExportPlan:
    """Find the checkpoint, the run's configuration and the model. Raises ValueError if one of them is missing."""
    from alphaapollo.models.load import load_config

    check_config_and_get_notices(config)
    checkpoint = _find_checkpoint(Path(config.checkpoint).expanduser().resolve())
    run = checkpoint.parents[1]
    saved = read_saved_config(run)
    model = _read_model_section(saved, run, config)
    kind: ModelKind = "reward model" if "bradley_terry" in saved else config.role
    weights = _find_weights_folder(checkpoint, kind)
    stored_dtype, dtypes = str(getattr(load_config(model), "dtype", "")).removeprefix("torch."), ("float32", "bfloat16")
    dtype = next(name for name in (config.dtype, model.dtype, stored_dtype, "float32") if name in dtypes)
    name = f"{checkpoint.name}_critic" if kind == "critic" else checkpoint.name
    output = _find_output(config, run / "exported" / name)
    if config.export_lora == "adapter" and not (model.lora_rank and kind == "policy"):
        raise ValueError(f"export_lora=adapter needs a policy with LoRA, but {run} has none. Use export_lora=merged.")
    return ExportPlan(checkpoint, weights, kind, model, saved, dtype, output, config.export_lora)


def _find_output(config: ExportConfig, default: Path) -> Path:
    """Return the folder or file to write. Raises ValueError if it exists."""
    output = Path(config.output).expanduser().absolute() if config.output else default
    if output.exists():
        raise ValueError(f"output={output} already exists. Set output to another folder, or remove the existing one.")
    return output


def write_export(export: ExportPlan) -> str:
    """Write the Hugging Face folder, verify that plain transformers computes the same outputs with it, and give it its
    final name. Returns the result of the comparison as a sentence. Raises ValueError if the outputs differ."""
    import torch

    from alphaapollo.models.export import OUTPUT_NAMES
    from alphaapollo.workers.export import export_checkpoint

    dtype: torch.dtype = getattr(torch, export.dtype)
    with _rename_when_complete(export.output) as unverified:
        difference = export_checkpoint(
            str(export.weights_folder), export.model, dtype, str(unverified), export.export_lora, export.kind
        )
        comparison = (
            f"Plain transformers loads this folder. Its {OUTPUT_NAMES[export.kind]} of a few fixed tokens differ from "
            f"those of the checkpoint by {difference:.1e} on average (weights in {export.dtype})."
        )
        step, run = int(read_progress(export.checkpoint)["step"]), export.checkpoint.parents[1]
        is_adapter = export.export_lora == "adapter"
        card = format_model_card(export.run_config, run, step, export.kind, export.model.path, comparison, is_adapter)
        (unverified / "README.md").write_text(card, encoding="utf-8")
    return comparison


def _find_weights_folder(checkpoint: Path, kind: ModelKind) -> Path:
    names = ("critic",) if kind == "critic" else ("policy", "model")
    for name in names:
        if (checkpoint / name / "state.json").is_file():
            return checkpoint / name
    raise ValueError(
        f"{checkpoint} has no folder {' or '.join(names)}. Use a checkpoint of main_ppo or of a fine-tuning run, and "
        "role=critic only for algorithms with a critic."
    )


def _find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest checkpoint if `path` is the folder of a run."""
    written = list_checkpoints(path)
    if not written:
        raise ValueError(f"checkpoint={path} is no complete checkpoint (no {PROGRESS}), and has none. {NO_MODEL_HINT}")
    if messages := find_damage(written[-1]):
        raise ValueError(f"{written[-1]} is damaged: {', '.join(messages)}. Export another checkpoint.")
    return written[-1]


def _read_model_section(saved: JsonObject, run: Path, config: ExportConfig) -> Model:
    """Return the `model` section of the exported model from the saved configuration, which may have older keys."""
    section = saved.get("actor_rollout_ref", saved)
    if not isinstance(section, dict) or not isinstance(section.get("model"), dict):
        raise ValueError(
            f"{run} is not a run of main_ppo or of a fine-tuning command. Set checkpoint to a run of one of them."
        )
    model = build_config(Model, drop_unknown_keys(Model, section["model"]))
    if config.trust_remote_code is None:
        refuse_saved_code(run, {"trust_remote_code": True} if model.trust_remote_code else {})
    model = model.model_copy(update={"trust_remote_code": bool(config.trust_remote_code)})
    if config.role == "critic" and isinstance(saved.get("critic"), dict):
        from alphaapollo.workers.builders import make_critic_model_section

        model = make_critic_model_section(model, build_config(Critic, drop_unknown_keys(Critic, saved["critic"])))
    if config.model_path:
        return model.model_copy(update={"path": config.model_path})
    exported = run / "model"
    no_base = is_local_path(model.path) and not Path(model.path).is_dir()  # moved, or relative to another directory
    if no_base and config.role == "policy" and config.export_lora == "merged" and (exported / "config.json").is_file():
        return model.model_copy(update={"path": str(exported), "tokenizer_path": ""})
    return model


if __name__ == "__main__":
    run_program(main)
