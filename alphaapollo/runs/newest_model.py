"""Find the newest model of a run and its generation settings. Used by every command that takes a model's path."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.config.check import list_model_paths
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import ConfigT, format_override, get_value, replace_value
from alphaapollo.config.load import SavedConfig, drop_unknown_keys, load_config
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.config.schema.model import Lora
from alphaapollo.data.vocabulary import read_sampling_settings
from alphaapollo.processes.python_command import make_module_command, make_subprocess_environ
from alphaapollo.runs.checkpoint_folder import PROGRESS, list_checkpoints
from alphaapollo.runs.input_digests import digest_file
from alphaapollo.runs.resume import read_saved_config
from alphaapollo.utils.hub import (
    explain_foreign_checkpoint,
    explain_gguf_file,
    explain_model_folder,
    find_verl_shards,
    needs_conversion,
)
from alphaapollo.utils.json_types import JsonObject

NO_MODEL_HINT = (
    "A run writes checkpoints (trainer.save_freq), and its model at the end (trainer.export_hf). Resume this run, or "
    "use another folder."
)
PROMPT_KEYS = ("max_prompt_length", "max_response_length", "system_prompt", "apply_chat_template_kwargs")


@dataclass(frozen=True)
class RunModel:
    """Location of a run's model: a Hugging Face folder that transformers and vLLM can load."""

    run_folder: Path  # folder of the run; the model's folder if the run is unknown
    model_folder: Path
    source: Path | None = None  # checkpoint or LoRA adapter that must be exported to `model_folder` first


def find_newest_model(path: Path) -> RunModel:
    """Return the newest model in `path`, the folder of a run, a checkpoint, a model or an adapter."""
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ValueError(
            explain_gguf_file(str(path))
            or f"{path} is not a folder. Use the folder of a run, e.g. outputs/alphaapollo/default, or of a model."
        )
    if not (has_complete_weights(path) or needs_conversion(path)) and (completed := list_checkpoints(path)):
        checkpoint, model = completed[-1], path / "model"
        progress = checkpoint / PROGRESS  # without it the checkpoint is damaged, which the export reports
        if has_complete_weights(model) and progress.is_file() and model.stat().st_mtime >= progress.stat().st_mtime:
            return RunModel(path, model)
        run = checkpoint.parents[1]
        exported = run / "exported" / checkpoint.name
        return RunModel(run, exported, None if has_complete_weights(exported) else checkpoint)
    for model in (path, path / "model"):
        if needs_conversion(model):
            return _find_merged_model(model)
        if has_complete_weights(model):
            if problem := explain_model_folder(model):
                raise ValueError(problem)
            return RunModel(_find_run_of_model(model), model)
    raise ValueError(
        explain_foreign_checkpoint(path) or f"{path} has no model and no complete checkpoint yet. {NO_MODEL_HINT}"
    )


def has_complete_weights(folder: Path) -> bool:
    """Return whether the folder is a Hugging Face model with complete weights, not only LoRA adapters or shards."""
    return (folder / "config.json").is_file() and not needs_conversion(folder)


def _find_merged_model(adapter: Path) -> RunModel:
    """Return the model with an adapter merged into its base model, or converted from verl. The model's folder is named
    after the content of the adapter's or verl's files."""
    digest = hashlib.sha256()
    for file in filter(Path.is_file, find_verl_shards(adapter) or sorted(adapter.glob("adapter_*"))):
        digest.update(digest_file(file).encode())
    merged = Path("outputs/merged").absolute() / f"{adapter.name}-{digest.hexdigest()[:12]}"
    run = _find_run_of_model(adapter)
    source = None if has_complete_weights(merged) else adapter
    return RunModel(merged if run == adapter else run, merged, source)


def _find_run_of_model(model: Path) -> Path:
    """Return the folder of the run that wrote the model, or `model` if the run is unknown."""
    for run in (model.parent, model.parents[1]):
        if (run / "config.yaml").is_file() and model.parent.name in (run.name, "exported"):
            return run
    return model


def make_generation_config_values(run_model: RunModel) -> JsonObject:
    """Return values for a GenerationConfig from the run's saved configuration: engine, environment, tools and token
    limits. Graders are left out. Without a run, the model's generation_config.json has the sampling settings."""
    has_run = run_model.run_folder != run_model.model_folder and (run_model.run_folder / "config.yaml").is_file()
    saved = read_saved_config(run_model.run_folder) if has_run else {}
    role, data = saved.get("actor_rollout_ref", saved), saved.get("data", {})
    single_engine = {"num_engines": 1, "router_replay": False, "sampling_mask": "auto", "lora": "merged"}
    sampling = role.get("rollout", {}) if has_run else read_sampling_settings(str(run_model.model_folder))
    rollout = {name: value for name, value in sampling.items() if name != "gpu_memory_utilization"}
    merged = {"path": str(run_model.model_folder), "tokenizer_path": ""} | Lora().model_dump()  # adapters are merged
    values = {
        "model": role.get("model", {}) | merged,
        "rollout": rollout | single_engine,
        "env": saved.get("env", {}),
        "data": {name: data[name] for name in PROMPT_KEYS if name in data},
        "trainer": {"controller": "local"},
    }
    return drop_unknown_keys(GenerationConfig, values)


def load_run_model(run: str, overrides: Sequence[str]) -> tuple[RunModel, GenerationConfig]:
    """Return the newest model of a run, exported if necessary, and its settings. overrides: KEY=VALUE words."""
    newest = find_newest_model(Path(run))
    saved = SavedConfig(newest.run_folder, make_generation_config_values(newest))
    config = load_config(GenerationConfig, "generation", overrides, saved)
    export_newest_model(newest, config.model.trust_remote_code)
    return newest, config


def export_newest_model(newest: RunModel, trust_remote_code: bool = False, trust_key: str = "") -> None:
    """Export the checkpoint, or merge the adapter, in a subprocess, if this is not done yet. trust_key: key of the
    command for code that comes with the model."""
    if newest.source is None:
        return
    keys = [format_override("checkpoint", str(newest.source)), format_override("output", str(newest.model_folder))]
    keys += ["trust_remote_code=true"] if trust_remote_code else []
    command = make_module_command("alphaapollo.trainer.main_export", *keys)
    if subprocess.run(command, env=make_subprocess_environ(), check=False).returncode:
        hint = f" Here, {trust_key}=true stands for trust_remote_code=true." if trust_key else ""
        raise ConfigError(f"{newest.source} could not be exported. See the error of the export above.{hint}")


def resolve_model_paths(config: ConfigT) -> ConfigT:
    """Replace the folder of a run, a checkpoint or an adapter by that of its model, in each key with a model's path."""
    for key, path in list_model_paths(config):
        folder = Path(path).expanduser()
        if not path or not folder.is_dir() or has_complete_weights(folder):
            continue
        try:
            newest = find_newest_model(folder)
        except ValueError as error:
            if (folder / "config.yaml").is_file():
                raise ConfigError(f"{key}={path}: {error}") from None
            continue  # not a run: the checks of the command describe what is missing
        owner = {"critic.model.path": "actor_rollout_ref.model.path"}.get(key, key)
        trust_key = f"{owner.removesuffix('path')}trust_remote_code"
        export_newest_model(newest, bool(get_value(config, trust_key)), trust_key)
        config = replace_value(config, key, str(newest.model_folder))
    return config
