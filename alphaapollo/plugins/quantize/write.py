"""Conversion of a language model to a folder with weights of 4 bits, in the format of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor, nn

from alphaapollo.config.schema import Model
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.models.checkpoint import explain_write_errors
from alphaapollo.models.decoder import find_vision_modules
from alphaapollo.models.export import (
    check_exported_outputs,
    compute_outputs,
    compute_transformers_outputs,
    gather_parameters,
    list_parameters,
    write_folder,
)
from alphaapollo.models.load import find_quantization, load_causal_lm, load_config
from alphaapollo.models.moe_routing import ExpertSizes
from alphaapollo.models.quantized import PACKED, dequantize
from alphaapollo.plugins.quantize.prompts import read_prompts
from alphaapollo.plugins.quantize.rounding import round_to_groups
from alphaapollo.plugins.quantize.scaling import scale_layers
from alphaapollo.runs.model_card import format_card_head, shorten_path
from alphaapollo.utils.json_types import JsonObject

TEXT = """A wave is a disturbance that carries energy from one place to another without carrying matter. Drop a stone
into a pond: rings travel outwards, but a leaf on the water only moves up and down. If the rings are 2 metres apart and
3 of them pass the leaf each second, they travel at 2 * 3 = 6 metres per second. Light is a wave, too, although it needs
no water or air. In 1801 Thomas Young sent light through two narrow slits and saw bright and dark stripes on a screen,
because two waves that meet add where they agree and cancel where they do not.

def speed(wavelength, frequency):
    return wavelength * frequency
"""
"""Text with which a quantized model is compared with the original."""
MAX_TOKENS = 256  # of TEXT
MAX_SCALING_CHANGE = 0.02  # nats: largest mean |change| of log-probs from scaling alone


@dataclass(frozen=True)
class QuantizedModel:
    """What `quantize_model` wrote."""

    num_weights: int  # weights of 4 bits
    original_bytes: int
    written_bytes: int  # of all weights
    logprob: float  # mean log-prob of a token of TEXT in the original
    nearest: LogprobChange  # of weights rounded to nearest
    scaled: LogprobChange | None  # of the written weights, if they were scaled before

    def __str__(self) -> str:
        sizes = (
            f"{self.num_weights:,} weights have 4 bits; all weights take {self.written_bytes / 2**20:,.1f} MiB instead "
            f"of {self.original_bytes / 2**20:,.1f} MiB. On a fixed text, the mean log-prob of a token changes from "
            f"{self.logprob:.4f} by {self.scaled or self.nearest}."
        )
        if self.scaled is None:
            return sizes
        gain = self.nearest.difference - self.scaled.difference
        verdict = f"gains {gain:.4f} nats" if gain > 0 else f"does not help this model: it loses {-gain:.4f} nats"
        return f"{sizes} Without scaling, it changes by {self.nearest}. Scaling {verdict} of the average."


@dataclass(frozen=True)
class LogprobChange:
    """Change of the log-probs of TEXT, in nats per token."""

    mean: float  # negative if TEXT is less likely
    difference: float  # mean |change|

    @classmethod
    def between(cls, original: list[float], other: list[float]) -> Self:
        change = torch.tensor(other, dtype=torch.float64) - torch.tensor(original, dtype=torch.float64)
        return cls(float(change.mean()), float(change.abs().mean()))

    def __str__(self) -> str:
        return f"{self.mean:+.4f} nats, and that of each token by {self.difference:.4f} nats on average"


def quantize_model(source: Model, folder: Path, group_size: int, prompts: str | None = None) -> QuantizedModel:
    """Write the language model `source` to a new `folder`. Linear layers before the output head get weights of 4 bits,
    symmetric, in groups of `group_size` inputs, rounded to nearest; other weights remain as they are. prompts: file
    with which weights are scaled before, as `scale_layers` says.

    Raises:
        ValueError: the model or `prompts` cannot be read, the model cannot be quantized or scaled, `folder` exists, or
            transformers reads other weights from it.
        OSError: the folder cannot be written. No incomplete `folder` remains.
    """
    if folder.exists():
        raise ValueError(f"{folder} already exists. Remove it, or choose another folder.")
    if method := find_quantization(load_config(source)):
        raise ValueError(f"{source.path} has quantized weights ({method}). Use the original model.")
    if find_spec("compressed_tensors") is None:  # a dependency of vLLM
        raise ValueError("the package compressed-tensors is missing. Install it: pip install compressed-tensors")
    texts = None if prompts is None else read_prompts(prompts, source)
    token_ids = load_tokenizer(source.path, source.trust_remote_code)(TEXT).input_ids[:MAX_TOKENS]
    compute = partial(compute_outputs, kind="policy", token_ids=token_ids)
    model = load_causal_lm(source, "padded")
    dtype = model.dtype
    original = compute(model.float())
    tensors = round_layers(model, dtype, source.path, group_size)
    rounded = compute(model)
    nearest, scaled = LogprobChange.between(original, rounded), None
    if texts is not None:
        del model, tensors  # before it is loaded again
        model = load_causal_lm(source, "padded").float()
        scale_layers(model, texts, group_size, dtype)
        if (change := LogprobChange.between(original, compute(model)).difference) > MAX_SCALING_CHANGE:
            raise ValueError(f"{source.path}: scaling changes log-probs by {change:.3f} nats. Leave --prompts out.")
        tensors = round_layers(model, dtype, source.path, group_size)
        rounded = compute(model)
        scaled = LogprobChange.between(original, rounded)
    num_weights = sum(2 * tensor.nbytes for name, tensor in tensors.items() if name.endswith(PACKED))
    original_bytes = sum(tensor.nbytes for tensor in list_parameters(model, dtype).values())
    written_bytes = sum(tensor.nbytes for tensor in tensors.values())
    mean = float(torch.tensor(original).mean())
    result = QuantizedModel(num_weights, original_bytes, written_bytes, mean, nearest, scaled)
    with explain_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as part:
            written = Path(part, "model")
            head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
            model.config.quantization_config = make_quantization_config(head, group_size)
            write_folder(written, tensors, model.config, dtype, source)
            (written / "README.md").write_text(_format_card(source.path, group_size, result), encoding="utf-8")
            read = compute_transformers_outputs(written, "policy", token_ids, source)
            check_exported_outputs(rounded, read, torch.float32)
            written.rename(folder)
    return result


def round_layers(model: Any, dtype: torch.dtype, path: str, group_size: int) -> dict[str, Tensor]:
    """Round the weights of a float32 model in place. Returns all its tensors in a file of `dtype`. Raises ValueError as
    `find_layers`."""
    layers = find_layers(model, path, group_size)
    tensors = dict(gather_parameters(model, dtype))
    for name, layer in layers.items():
        codes, scales = round_to_groups(layer.weight.data, group_size)
        packed = pack_layer(name, codes, scales)
        layer.weight.data = dequantize(packed[name + PACKED].view(torch.uint8), scales, torch.float32)
        del tensors[f"{name}.weight"]
        tensors |= packed
    return tensors


def find_layers(model: Any, path: str, group_size: int) -> dict[str, nn.Linear]:
    """Return the linear layers before the output head, by name. Raises ValueError for a vision-language model, a
    mixture of experts, and layers whose inputs cannot be split into groups."""
    for kind, is_kind in (
        ("a vision-language model", bool(find_vision_modules(model))),
        ("a mixture of experts", ExpertSizes.from_config(model.config) is not None),
    ):
        if is_kind:
            raise ValueError(f"{path} is {kind}, which cannot be quantized. Choose another model.")
    head = model.get_output_embeddings()
    modules = model.named_modules()
    layers = {name: module for name, module in modules if isinstance(module, nn.Linear) and module is not head}
    for name, layer in layers.items():
        if layer.in_features % group_size:
            fix = "Use --group-size 32" if layer.in_features % 32 == 0 else "Choose another model"
            inputs = f"{layer.in_features} inputs, which are no multiple of the group size {group_size}"
            raise ValueError(f"{path}: the layer {name} has {inputs}. {fix}.")
    return layers


def pack_layer(name: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a layer in a file: eight codes per int32 [out, in / 8], each plus 8, the first in the
    lowest bits; scales; shape."""
    columns = (codes + 8).int().unflatten(1, (-1, 8)).unbind(2)
    packed = sum(column << 4 * index for index, column in enumerate(columns))
    tensors = {"packed": packed, "scale": scales, "shape": torch.tensor(codes.shape)}
    return {f"{name}.weight_{part}": tensor for part, tensor in tensors.items()}


def make_quantization_config(head: str, group_size: int) -> JsonObject:
    """Return the section `quantization_config` of config.json. head: name of the output head."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [head],
    }


def _format_card(path: str, group_size: int, result: QuantizedModel) -> str:
    scaling = " after activation-aware scaling (AWQ), which also changes norms" if result.scaled else ""
    unchanged = "The embedding and the output head" if result.scaled else "The embedding, the output head and norms"
    return (
        f"{format_card_head(path, is_adapter=False, tags=['compressed-tensors'])}\n\n"
        f"{shorten_path(path)} with weights of 4 bits (compressed-tensors, W4A16, symmetric, groups of {group_size}, "
        f"rounded to nearest{scaling}). {unchanged} are unchanged.\n\n{result}\n"
    )
