"""The policy's weights whole, under the names of a Hugging Face checkpoint: for the engines, and for folders that
transformers and vLLM load."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.config.schema import LoraForm, Model
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.export.safetensors_files import SafetensorsWriter
from alphaapollo.models.lora import adapter_tensors, is_adapter, lora_layers, merged_weight, plain_name, write_adapter
from alphaapollo.models.sharding import full_tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from alphaapollo.models.critic import CriticModel


@torch.no_grad()
def full_parameters(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each parameter gathered from all ranks, cast to `dtype` before it travels, layer by layer (a collective: every
    rank must exhaust it).

    Names are those of a checkpoint, where they differ from the model's own (transformers fuses a layer's experts into
    one tensor; checkpoints have one an expert). Tied parameters come once. Adapters are merged into their weights.
    """
    from transformers.core_model_loading import revert_weight_conversion

    adapted = lora_layers(model)
    for names in _names_by_layer(model):
        parameters = dict(model.named_parameters())
        whole = {}
        for name in names:
            if not is_adapter(name):
                weight = merged_weight(adapted[name]) if name in adapted else parameters[name].detach()
                whole[plain_name(name)] = full_tensor(weight.to(dtype))
        for name, tensor in revert_weight_conversion(model, whole).items():
            owns_memory = tensor.untyped_storage().nbytes() == tensor.nbytes
            yield name, tensor.contiguous() if owns_memory else tensor.clone()  # safetensors refuses views


def export(folder: str, model: PreTrainedModel, source: Model, dtype: torch.dtype, form: LoraForm) -> None:
    """Write weights, configuration and tokenizer, whole or not at all (a collective of all ranks; rank 0 writes).

    form: adapter: of a model with LoRA its adapters alone, as peft's folder on `source`.
    Raises OSError that names the folder, e.g. for a full disk.
    """
    from safetensors import SafetensorError

    whole = Path(folder)
    partial = whole.with_name(f".writing_{whole.name}")
    try:
        if form == "adapter":
            adapter = {name: tensor.cpu() for name, tensor in adapter_tensors(model)}
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
                write_adapter(partial, model, adapter, source.path)
        else:
            _write_weights(partial, model, dtype)
            if dist.get_rank() == 0:
                _write_rest(partial, model, source, dtype)
        if dist.get_rank() == 0:
            shutil.rmtree(whole, ignore_errors=True)
            partial.rename(whole)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(f"cannot write the model to {folder}: {error}") from error
    dist.barrier()


def export_critic(folder: str, critic: CriticModel, source: Model, dtype: torch.dtype) -> None:
    """As a token classifier with one label, whose score is the value, for a folder that is not there yet (one rank).
    The head stays in float32.

    ValueError: transformers has no such classifier of this model. OSError names the folder.
    """
    from safetensors import SafetensorError
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    config = copy.deepcopy(critic.model.config)
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise ValueError(f"transformers has no token classifier of a {config.model_type}, which its critic would be.")
    config.num_labels = 1
    try:
        files = SafetensorsWriter(Path(folder))
        for name, tensor in full_parameters(critic.model, dtype):
            files.add(f"{kind.base_model_prefix}.{name}", tensor.cpu())
        for name, parameter in critic.value_head.named_parameters():
            files.add(f"score.{name}", full_tensor(parameter.detach()).float().cpu())
        files.close()
        _write_config(Path(folder), config, kind.__name__, dtype)
        _write_beside(Path(folder), source)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(f"cannot write the model to {folder}: {error}") from error


def _write_weights(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A collective of all ranks. Rank 0 writes, a file as soon as it is full: the whole model is on no rank."""
    files = None
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        files = SafetensorsWriter(folder)
    for name, tensor in full_parameters(model, dtype):
        if files:
            files.add(name, tensor.cpu())
    if files:
        for name, buffer in _buffers(model).items():
            files.add(name, buffer)
        files.close()


def _write_rest(folder: Path, model: PreTrainedModel, source: Model, dtype: torch.dtype) -> None:
    """Configuration and tokenizer."""
    _write_config(folder, copy.deepcopy(model.config), type(model).__name__, dtype)
    if model.can_generate() and model.generation_config is not None:
        # Not save_pretrained, which refuses what many published models have, at the end of a long run.
        model.generation_config.to_json_file(folder / "generation_config.json")
    _write_beside(folder, source)


def _write_config(folder: Path, config: PretrainedConfig, architecture: str, dtype: torch.dtype) -> None:
    config.dtype = dtype
    config.architectures = [architecture]
    config.save_pretrained(folder)


def _write_beside(folder: Path, source: Model) -> None:
    """The model's own code, and its tokenizer."""
    from transformers import AutoTokenizer

    for code in Path(source.path).glob("*.py"):  # of a model that brings its own
        shutil.copy(code, folder)
    tokenizer = AutoTokenizer.from_pretrained(
        source.tokenizer_path or source.path, trust_remote_code=source.trust_remote_code
    )
    tokenizer.save_pretrained(folder)


def _buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint holds besides parameters."""
    persistent = model.state_dict().keys()
    return {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in persistent}


def _names_by_layer(model: PreTrainedModel) -> list[list[str]]:
    """Parameter names, one list a decoder layer, and one for the rest."""
    layers = {id(layer) for layer in decoder_layers(model)}
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in layers]
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        groups.setdefault(prefix, []).append(name)
    return list(groups.values())
