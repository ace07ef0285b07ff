"""LoRA (arXiv 2106.09685) through peft.

A linear layer computes W x + scale B A x with scale = alpha / rank. W is frozen and has the dtype of forward passes;
A [rank, in] and B [out, rank] are trained in float32.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Lora, Model
from alphaapollo.models.decoder import find_vision_modules
from alphaapollo.models.load import load_causal_lm, load_reward_model
from alphaapollo.models.quantized import dequantize_layers
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.runs.model_card import format_card_head, shorten_path
from alphaapollo.utils.deadline import limit_seconds
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"  # peft's name of the adapter
PATTERN_SECONDS = 10  # time limit to match one pattern with the names of all modules


def load_trainable_lm(model: Model, attention: Attention, dtype: torch.dtype | None, seed: int) -> PreTrainedModel:
    """Load a causal language model for training. dtype: of forward passes, for a model on the meta device; None: load
    the weights (load_causal_lm). Trained parameters are float32, or float64. With model.lora_rank, only adapters are
    trained, in float32 and initialized with `seed`. With model.freeze_vision, the vision tower is frozen."""
    loaded = load_causal_lm(model, attention, _get_parameter_dtype(model, dtype))
    if model.freeze_vision:
        for part in find_vision_modules(loaded):
            part.requires_grad_(False)
    if model.lora_rank:
        add_adapters(loaded, model, seed)
    return loaded


def load_trainable_reward_model(
    model: Model, attention: Attention, dtype: torch.dtype | None, seed: int
) -> PreTrainedModel:
    """Load a reward model for training (see load_trainable_lm). Its head is trained without an adapter."""
    loaded = load_reward_model(model, attention, _get_parameter_dtype(model, dtype), seed)
    if model.lora_rank:
        add_adapters(loaded, model, seed)
        for parameter in loaded.score.parameters():
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()
    return loaded


def _get_parameter_dtype(model: Model, dtype: torch.dtype | None) -> torch.dtype | None:
    return dtype if dtype is None or model.lora_rank else torch.promote_types(dtype, torch.float32)


def resolve_target_modules(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Return the names, e.g. `q_proj`, of the layers that get a LoRA adapter: the configured names, or those of all
    linear layers except the output head and the vision tower. Raises ValueError if a configured name is not a linear
    layer before the head, or is only in the vision tower."""
    head = model.get_output_embeddings() or getattr(model, "score", None)
    vision = _list_vision_modules(model)
    modules = {name: module for name, module in model.named_modules() if name not in vision}
    linear_paths = {name for name, part in modules.items() if isinstance(part, nn.Linear) and part is not head}
    names = sorted({path.rpartition(".")[2] for path in linear_paths})
    if not names:
        raise ValueError(f"target_modules: {type(model).__name__} has no linear layer to adapt. Set lora_rank=0.")
    if lora.target_modules == "all-linear":
        return names
    part = "language part of the " if vision else ""
    for target in lora.target_modules:
        matches = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not matches or not linear_paths.issuperset(matches):
            reason = "is not a linear layer before the output head" if matches else f"is not in the {part}model"
            raise ValueError(f"target_modules={target!r} {reason}. Use some of {', '.join(names)}, or all-linear.")
    return sorted(lora.target_modules)


def _list_vision_modules(model: PreTrainedModel) -> set[str]:
    """Return the names of all modules of the vision tower; empty for a text model."""
    tower = {module for part in find_vision_modules(model) for module in part.modules()}
    return {name for name, module in model.named_modules() if module in tower}


def add_adapters(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Add LoRA adapters to the model's linear layers in place, and freeze all other parameters. The A matrices are
    drawn from peft's initial distribution with `seed`; the B matrices are 0."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = resolve_target_modules(model, lora)
    excluded = sorted(name for name in _list_vision_modules(model) if name.rpartition(".")[2] in targets)
    config = LoraConfig(
        r=lora.lora_rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        exclude_modules=excluded or None,
        task_type="CAUSAL_LM",
    )
    on_meta = next(model.parameters()).is_meta
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=on_meta)
    generator = torch.Generator().manual_seed(derive_seed(seed, "lora"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter_parameter(name))
        if is_adapter_parameter(name):
            parameter.data = parameter.data.float()
        if ".lora_A." in name and not on_meta:
            nn.init.kaiming_uniform_(parameter.data, a=math.sqrt(5), generator=generator)


def is_adapter_parameter(name: str) -> bool:
    """Return whether a parameter with this name belongs to a LoRA adapter."""
    return ".lora_A." in name or ".lora_B." in name


def get_base_parameter_name(name: str) -> str:
    """Return the name that a parameter of a model with LoRA adapters has in the model without them."""
    return name.replace(".base_layer.", ".")


def get_lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have LoRA adapters, by the name of the weight that the adapter changes."""
    return {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager in which the model computes without its LoRA adapters."""
    layers = get_lora_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True  # peft's method also changes requires_grad, which FSDP has read
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def merge_lora_weight(layer: Any) -> Tensor:
    """Compute the merged weight W + scale B A of a LoRA layer in float32, sharded like W (a collective: gathers A)."""
    weight: Tensor = layer.base_layer.weight
    a = full_tensor(layer.lora_A[ADAPTER].weight.detach())
    b = local_tensor(layer.lora_B[ADAPTER].weight.detach()).to(a.device)  # the same rows as this rank's slice of W
    local_weight = local_tensor(weight.detach()).to(a.device, torch.float32)
    merged = torch.addmm(local_weight, b, a, alpha=layer.scaling[ADAPTER])
    if not isinstance(weight, DTensor):
        return merged
    return DTensor.from_local(merged, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())


@torch.no_grad()
def gather_adapter(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in peft's files, tensor) of all LoRA matrices A and B, gathered from the ranks, in float32 (a
    collective: every rank must exhaust the iterator)."""
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", full_tensor(parameter.detach())


@torch.no_grad()
def gather_scaled_adapter(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs of gather_adapter, with each matrix B multiplied by the LoRA scale."""
    (scale,) = {layer.scaling[ADAPTER] for layer in get_lora_layers(model).values()}
    for name, tensor in gather_adapter(model):
        yield name, tensor * scale if name.endswith("lora_B.weight") else tensor


def load_adapter(adapter: Path, base_path: str = "", trusts_code: bool = False) -> tuple[Any, Model, torch.dtype]:
    """Load an adapter of peft on its base model in float32. Returns the model, the base model's section and the dtype
    of its files. base_path: base model, if it has moved. Raises ValueError if the base model cannot be read."""
    from peft import PeftConfig, PeftModel
    from peft.utils import load_peft_weights

    config = PeftConfig.from_pretrained(str(adapter))
    if getattr(config, "megatron_config", None):  # peft would import the module `megatron_core` of the file
        raise ValueError("it is an adapter of Megatron's layers. Convert it first.")
    base = Model(path=base_path or config.base_model_name_or_path or "", trust_remote_code=trusts_code)
    loaded, weights = load_causal_lm(base, "padded"), load_peft_weights(str(adapter), device="cpu")
    dtype = loaded.dtype
    dequantize_layers(loaded)  # peft adds to weights in place
    _try_patterns(config, loaded, adapter)
    for embeddings in (weights[name] for name in weights if name.endswith(".embed_tokens.weight")):
        loaded.resize_token_embeddings(len(embeddings), mean_resizing=False)
    return PeftModel.from_pretrained(loaded.float(), str(adapter)).eval(), base, dtype


def _try_patterns(config: Any, model: nn.Module, adapter: Path) -> None:
    """Match the names of modules with the regular expressions of an adapter, as peft will do without a time limit.
    Raises ValueError if one is invalid or takes too long."""
    fields = [getattr(config, name, None) for name in ("target_modules", "exclude_modules", "feedforward_modules")]
    patterns = [field for field in fields if isinstance(field, str)]
    for name in ("modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern"):
        field = getattr(config, name, None) or ()
        patterns += [field] if isinstance(field, str) else field
    for pattern in patterns:
        if re.fullmatch(r"[\w.]*", pattern):
            continue  # a plain name
        try:
            with limit_seconds(PATTERN_SECONDS, f"it takes more than {PATTERN_SECONDS} seconds"):
                for name, _ in model.named_modules():
                    re.fullmatch(pattern, name)
                    re.match(rf"(.*?\.)?({pattern})(\..*)?$", name)
        except (ValueError, re.error) as error:
            reason = f"{adapter}/adapter_config.json has the regular expression {pattern[:80]!r}: {error}."
            raise ValueError(f"{reason} List the names of modules instead.") from error


def write_adapter(folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor], base_path: str) -> None:
    """Write a LoRA adapter folder, which peft and vLLM load on the base model at `base_path`, with a model card."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = model.peft_config[ADAPTER]
    config.base_model_name_or_path = str(Path(base_path).resolve()) if Path(base_path).is_dir() else base_path
    config.target_modules = sorted(config.target_modules)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    card = f"{format_card_head(base_path, is_adapter=True)}\n\nLoRA adapter of {shorten_path(base_path)}.\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")  # safetensors: owner only
