"""Linear layers with frozen weights of 4 bits: a rank keeps the codes and scales that the engine loads, and dequantizes
one layer at a time, in the forward pass and again in the backward pass.

    file (compressed-tensors, W4A16)                                   parameter
    weight_packed  int32 [out, in / 8], 8 more than the codes          codes  uint8 [out, in / 2], the same bytes
    weight_scale   [out, in / group]                                   scale  in the dtype of forward passes
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from alphaapollo.data.images import reads_images
from alphaapollo.models.cpu_linear import linear
from alphaapollo.models.moe_routing import ExpertSizes
from alphaapollo.models.sharding import local_tensor
from alphaapollo.models.weight_files import find_weight_files, map_tensors, read_tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"  # ends of names in files
SECTIONS = ("quantization_config", "compression_config")  # of config.json
BITS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


def read_quantization(config: PretrainedConfig) -> dict[str, Any]:
    """Return the section of config.json that says how weights are quantized; empty if they are not."""
    for part in (config, config.get_text_config()):
        for name in SECTIONS:
            if section := getattr(part, name, None):
                return {"quant_method": name} | (section if isinstance(section, dict) else section.to_dict())
    return {}


def remove_quantization(config: PretrainedConfig) -> None:
    """Remove the sections of `read_quantization`, so that transformers builds the model as if it were not quantized."""
    for part in (config, config.get_text_config()):
        for name in SECTIONS:
            vars(part).pop(name, None)


def find_unsupported_quantization(config: PretrainedConfig) -> str:
    """Return what keeps a model with quantized weights from being loaded for training, e.g. "zero points"; "" if it can
    be loaded, or is not quantized."""
    section = read_quantization(config)
    if (method := str(section.get("quant_method", ""))) != "compressed-tensors":
        return method
    groups = [*(section.get("config_groups") or {}).values()]
    weights = (groups[0].get("weights") if len(groups) == 1 else None) or {}
    reasons = {
        "the format {}": section.get("format") not in (None, "pack-quantized") and section["format"],
        "{} groups of layers": len(groups) != 1 and str(len(groups)),
        "zero points": weights.get("symmetric") is False,
        "weights of {0[num_bits]} bits ({0[type]}, one scale per {0[strategy]})": any(
            weights.get(key) != value for key, value in BITS.items()
        )
        and dict.fromkeys(BITS) | weights,
        "groups in the order of activations": weights.get("actorder") not in (None, False, "weight", "static"),
        "quantized activations": any(
            group.get(f"{kind}_activations") for group in groups for kind in ("input", "output")
        ),
        "a quantized KV cache": section.get("kv_cache_scheme"),
        "transformed weights": section.get("transform_config"),
        "sparse weights": (section.get("sparsity_config") or {}).get("format", "dense") != "dense",
        "experts": ExpertSizes.from_config(config) is not None,
        "a vision tower": reads_images(config),
    }
    return next((f"compressed-tensors with {text.format(value)}" for text, value in reasons.items() if value), "")


def read_group_size(config: PretrainedConfig, path: str) -> int:
    """Return the number of inputs that share a scale; 0 for a model that is not quantized. Raises ValueError for a
    quantization that is not supported."""
    if unsupported := find_unsupported_quantization(config):
        raise ValueError(f"model.path={path} has quantized weights ({unsupported}). Use the original model.")
    groups = read_quantization(config).get("config_groups", {})
    return next((int(group["weights"]["group_size"]) for group in groups.values()), 0)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights [out, in] that codes [out, in / 2] and scales [out, in / group] stand for."""
    columns = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    exact = torch.promote_types(dtype, torch.float32)
    groups = (columns.to(exact) - 8).unflatten(1, (scale.shape[1], -1))
    return (groups * scale[..., None].to(exact)).flatten(1).to(dtype)


class QuantizedLinear(nn.Linear):
    """Frozen linear layer with codes of 4 bits, two in a byte."""

    def __init__(self, codes: Tensor, scale: Tensor, bias: nn.Parameter | None):
        nn.Module.__init__(self)
        self.out_features, self.in_features = codes.shape[0], 2 * codes.shape[1]
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A new tensor with the dequantized weights [out, in], sharded like the codes."""
        values = dequantize(local_tensor(self.codes.detach()), local_tensor(self.scale.detach()), self.scale.dtype)
        if not isinstance(self.codes, DTensor):
            return values
        shape, stride = torch.Size((self.out_features, self.in_features)), (self.in_features, 1)
        mesh, placements = self.codes.device_mesh, self.codes.placements
        return DTensor.from_local(values, mesh, placements, shape=shape, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        product: Tensor = _QuantizedProduct.apply(flat, self.codes, self.scale, self.bias)
        return product.view(*x.shape[:-1], self.out_features)


class _QuantizedProduct(torch.autograd.Function):
    """x W^T + b with frozen W and b. The backward pass dequantizes W again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return linear(x, dequantize(codes, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scale = ctx.saved_tensors
        return linear(grad, dequantize(codes, scale, grad.dtype).t()), None, None, None


def read_state_dict(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the weights of a model with quantized layers, with `weight` of these layers as views of one number, which
    take no memory until `quantize_layers` replaces them. dtype: of these views."""
    tensors = dict[str, Tensor]()
    for name, file in map_tensors(find_quantized_layers(path)).items():
        if name.endswith(SHAPE):
            shape = read_tensor(file, name).tolist()
            tensors[f"{name.removesuffix(SHAPE)}.weight"] = torch.zeros(1, dtype=dtype).expand(shape)
        elif not name.endswith((PACKED, SCALE)):
            tensors[name] = read_tensor(file, name)
    return tensors


def quantize_layers(model: nn.Module, path: str, group_size: int) -> None:
    """Replace the linear layers that have codes in the files of a model, in place. Codes and scales are read if the
    model is not on the meta device."""
    for file, names in find_quantized_layers(path).items():
        for name in names:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            rows, columns, dtype = layer.out_features, layer.in_features, layer.weight.dtype
            if layer.weight.is_meta:
                codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
                scale = torch.empty(rows, columns // group_size, dtype=dtype, device="meta")
            else:
                codes = read_tensor(file, name + PACKED).view(torch.uint8)
                scale = read_tensor(file, name + SCALE).to(dtype)
            model.set_submodule(name, QuantizedLinear(codes, scale, layer.bias))


def find_quantized_layers(path: str) -> dict[Path, list[str]]:
    """Return the names of the quantized layers in each weight file. Raises ValueError if a file is missing."""
    if not (files := find_weight_files(path)):
        raise ValueError(f"model.path={path} has quantized weights, but not all files. Download it again.")
    return {file: sorted(n.removesuffix(PACKED) for n in map_tensors([file]) if n.endswith(PACKED)) for file in files}


def list_weight_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of the model's parameters, with `weight` instead of the codes and scales of quantized layers."""
    quantized = {name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    for name, _ in model.named_parameters():
        layer, _, key = name.rpartition(".")
        if layer not in quantized or key == "bias":
            yield name
        elif key == "codes":
            yield f"{layer}.weight"


@torch.no_grad()
def dequantize_layers(model: nn.Module) -> None:
    """Replace quantized layers by linear layers with the same weights, in place."""
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, QuantizedLinear):
            with torch.device("meta"):
                full = nn.Linear(layer.in_features, layer.out_features, bias=False)
            full.weight, full.bias = nn.Parameter(layer.weight), layer.bias
            model.set_submodule(name, full)


def iterate_codes_and_scales(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's codes (uint8) and scales of each quantized layer."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            yield local_tensor(layer.codes.detach()), local_tensor(layer.scale.detach())
