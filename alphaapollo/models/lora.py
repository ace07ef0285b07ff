"""LoRA (arXiv 2106.09685) through peft: a linear layer computes W x + scale B A x with scale = alpha / rank; W rests in
the dtype of the arithmetic, A [rank, in] and B [out, rank] are trained in float32.

add_adapters   a loaded model -> the same with adapters; B = 0, so it computes what it did
adapters_off   the model as its own reference
merged_weight  W + scale B A, sharded as W is: each rank adds up its own rows, so no second copy exists anywhere
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Lora, Model
from alphaapollo.models.cpu.linear import accelerate
from alphaapollo.models.load import load_causal_lm, load_or_init_reward_model, load_without_weights
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"  # peft's name of the one adapter


def load_trainable_lm(
    model: Model, attention: Attention, dtype: torch.dtype, materialize: bool, seed: int
) -> PreTrainedModel:
    """The model of a role that is trained, all parameters in float32 (float64 stays); with model.lora_rank frozen in
    `dtype`, under float32 adapters drawn by `seed`. Else as load_causal_lm."""
    if not model.lora_rank:
        return load_causal_lm(model, attention, torch.promote_types(dtype, torch.float32), materialize)
    loaded = load_causal_lm(model, attention, dtype, materialize)
    add_adapters(loaded, model, seed)
    return loaded


def load_trainable_reward_model(
    model: Model, attention: Attention, dtype: torch.dtype, materialize: bool, seed: int
) -> PreTrainedModel:
    """As load_trainable_lm, a reward model. Its head is trained whole, and a fresh one is drawn by `seed`, too."""
    if not model.lora_rank:
        return load_or_init_reward_model(model, attention, torch.promote_types(dtype, torch.float32), materialize, seed)
    loaded = load_or_init_reward_model(model, attention, dtype, materialize, seed)
    add_adapters(loaded, model, seed)
    for parameter in loaded.score.parameters():
        parameter.requires_grad_(True)
        parameter.data = parameter.data.float()
    return loaded


def check_targets(model: Model, key: str) -> None:
    """Raises ValueError for target_modules that the model does not have or that cannot carry an adapter; it is built
    without weights. `key`: of the section, e.g. actor_rollout_ref.model."""
    try:
        target_names(load_without_weights(model), model)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from error


def target_names(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Last parts of the names of the layers that get an adapter: as asked for, or every linear layer but the output
    head. Raises ValueError for a name that fits none of them, or something else."""
    head = model.get_output_embeddings() or getattr(model, "score", None)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    known = sorted({name.rpartition(".")[2] for name in linear})
    if not known:
        raise ValueError(f"target_modules: {type(model).__name__} has no linear layer to adapt. Set lora_rank=0.")
    if lora.target_modules == "all-linear":
        return known
    for target in lora.target_modules:
        fits = [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]
        if not fits or not linear.issuperset(fits):
            what = "is no linear layer below the output head" if fits else "is not in the model"
            raise ValueError(
                f"target_modules: {target!r} {what}. {type(model).__name__} has {', '.join(known)}. Give some of "
                "these, or all-linear."
            )
    return sorted(lora.target_modules)


def add_adapters(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Put adapters on the model's linear layers, in place, and freeze everything else. A is drawn as peft draws it, but
    as a function of `seed`; B is 0."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.lora_rank,
        lora_alpha=lora.alpha,
        target_modules=target_names(model, lora),
        task_type="CAUSAL_LM",
    )
    on_meta = next(model.parameters()).is_meta
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=on_meta)
    generator = torch.Generator().manual_seed(derive_seed(seed, "lora"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()
        if ".lora_A." in name and not on_meta:
            nn.init.kaiming_uniform_(parameter.data, a=math.sqrt(5), generator=generator)
    accelerate(model)


def is_adapter(name: str) -> bool:
    """Of a parameter's name."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The name of a parameter in the model without adapters."""
    return name.replace(".base_layer.", ".")


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by the name of the weight that each adapts; empty for a model without adapters."""
    return {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model computes what it did before it was trained."""
    layers = lora_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch also changes requires_grad, which FSDP has read
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """W + scale B A, computed in float32, sharded as W (a collective of all ranks: A is gathered)."""
    weight: Tensor = layer.base_layer.weight
    a = full_tensor(layer.lora_A[ADAPTER].weight.detach())
    b = local_tensor(layer.lora_B[ADAPTER].weight.detach()).to(a.device)  # the rows that this rank has of W
    own = local_tensor(weight.detach()).to(a.device, torch.float32)
    merged = torch.addmm(own, b, a, alpha=layer.scaling[ADAPTER])
    if not isinstance(weight, DTensor):
        return merged
    return DTensor.from_local(merged, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())


@torch.no_grad()
def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A and B whole, float32, under the names of peft's files (a collective: every rank must exhaust it)."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", full_tensor(parameter.detach())


@torch.no_grad()
def scaled_adapter(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As adapter_tensors, with the scale in B: what is left to whoever adds B A x is nothing."""
    (scale,) = {layer.scaling[ADAPTER] for layer in lora_layers(model).values()}
    for name, tensor in adapter_tensors(model):
        yield name, tensor * scale if name.endswith("lora_B.weight") else tensor


def write_adapter(folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor], base: str) -> None:
    """adapter_config.json and adapter_model.safetensors, as peft and vLLM load them on the model at `base`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = model.peft_config[ADAPTER]
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    config.target_modules = sorted(config.target_modules)
    config.inference_mode = True
    config.save_pretrained(str(folder))
