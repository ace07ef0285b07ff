"""Activation-aware scaling of weights before they are rounded (AWQ, arXiv 2306.00978, section 3.2).

A layer gets W diag(s) instead of W, and the module before it computes x / s instead of x: the same products, but with
smaller errors of rounding where inputs are large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from alphaapollo.models.decoder import find_decoder_layers, get_attention_head_size
from alphaapollo.plugins.quantize.rounding import round_to_groups

NUM_EXPONENTS = 20  # of the grid over [0, 1)
SMALLEST = 1e-4  # mean |x|
MAX_ROWS = 1024  # of the layers with the same input, for which errors are computed
BEFORE = {"o_proj": "v_proj", "down_proj": "up_proj"}
"""Layers whose inputs are proportional to the outputs of another layer."""


@torch.no_grad()
def scale_layers(model: Any, token_ids: Tensor, group_size: int, dtype: torch.dtype) -> None:
    """Scale the linear layers of a float32 model that follow a norm or a layer of BEFORE, in place. Each decoder layer
    is scaled when it has computed its outputs, so that the inputs of one are in memory at a time.

    token_ids: texts of the same length [N, T]. dtype: to which norms and biases are rounded, as they are written.
    """
    head_size, handles = get_attention_head_size(model.config.get_text_config()), list[Any]()
    try:
        for layer in find_decoder_layers(model):
            recorder = InputRecorder(head_size, group_size, dtype)
            handles.append(layer.register_forward_hook(recorder.scale))
            handles += [part.register_forward_hook(recorder.record) for part in layer.modules() if part is not layer]
        model.base_model(input_ids=token_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


class InputRecorder:
    """Hooks of a decoder layer, which record the inputs of its linear layers and then scale them."""

    def __init__(self, head_size: int, group_size: int, dtype: torch.dtype):
        self._head_size, self._group_size, self._dtype = head_size, group_size, dtype
        self._inputs: dict[int, tuple[Tensor, list[nn.Linear]]] = {}  # by id: input, and the layers that share it
        self._norms: dict[int, tuple[Tensor, nn.Module]] = {}  # by id: output, and its norm

    def record(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Linear):
            self._inputs.setdefault(id(args[0]), (args[0], []))[1].append(module)
        elif isinstance(weight := getattr(module, "weight", None), nn.Parameter) and weight.ndim == 1:
            self._norms[id(output)] = output, module

    def scale(self, decoder_layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        sources = {layer: source for layer, *source in find_layers_before(decoder_layer, self._head_size)}
        for key, (x, layers) in self._inputs.items():
            before = sources.get(layers[0], [])
            if key in self._norms:
                before = [self._norms[key][1], torch.arange(x.shape[-1])]
            if before:
                source, outputs = cast("tuple[nn.Module, Tensor]", before)
                weight = torch.cat([layer.weight.data for layer in layers])
                scales = find_scales(weight, x.flatten(0, -2), outputs, self._group_size)
                scales = divide_outputs(source, scales, self._dtype)[outputs]
                for layer in layers:
                    layer.weight.data *= scales
        self._inputs.clear()
        self._norms.clear()


def find_layers_before(decoder_layer: nn.Module, head_size: int) -> Iterator[tuple[nn.Linear, nn.Linear, Tensor]]:
    """Yield (layer, layer before it, index [in] of the output that each input is proportional to). Heads with shared
    values share outputs."""
    named = dict(decoder_layer.named_modules())
    for name, layer in named.items():
        prefix, _, last = name.rpartition(".")
        source = named.get(f"{prefix}.{BEFORE.get(last)}")
        is_product = last == "o_proj" or f"{prefix}.gate_proj" in named
        if isinstance(layer, nn.Linear) and isinstance(source, nn.Linear) and is_product:
            copies, rest = divmod(layer.in_features, source.out_features)
            heads = torch.arange(source.out_features).view(-1, head_size if copies > 1 else 1)
            if not rest:
                yield layer, source, heads.repeat_interleave(copies, 0).flatten()


def find_scales(weight: Tensor, x: Tensor, outputs: Tensor, group_size: int) -> Tensor:
    """Return the scales mean|x|^alpha [outputs before] with the smallest squared error of the products with rounded
    weights, over a grid of alpha (equations 4 and 5). weight: [out, in]; x: [tokens, in]; outputs: index [in]"""
    weight = weight[:: -(-len(weight) // MAX_ROWS)]
    gram = x.T @ x  # |x (W' - W)^T|^2 = tr((W' - W) gram (W' - W)^T), for any number of tokens
    sizes = torch.zeros(int(outputs.max()) + 1).index_add(0, outputs, x.abs().mean(0)) / outputs.bincount()
    best = (torch.inf, sizes)
    for number in range(NUM_EXPONENTS):
        scales = sizes.clamp(min=SMALLEST) ** (number / NUM_EXPONENTS)
        scales /= (scales.max() * scales.min()).sqrt()
        codes, steps = round_to_groups(weight * scales[outputs], group_size)
        rounded = (codes.unflatten(1, (-1, group_size)) * steps.float()[..., None]).flatten(1)
        error = rounded / scales[outputs] - weight
        best = min(best, (float(((error @ gram) * error).sum()), scales), key=lambda pair: pair[0])
    return best[1]


def divide_outputs(source: nn.Module, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide the outputs of a linear layer or a norm by scales, in place. Returns the scales after a norm's weight was
    rounded to `dtype`, by which its outputs are divided exactly."""
    weight = cast("nn.Parameter", source.weight)
    if isinstance(source, nn.Linear):
        weight.data /= scales[:, None]
    else:
        offset = find_offset(source, weight)
        divided = ((offset + weight.data) / scales - offset).to(dtype).float()
        exact = (offset + weight.data) / (offset + divided)
        is_usable = exact.isfinite() & (exact > 0)  # not where the weight is zero
        scales, weight.data = exact.where(is_usable, torch.ones(())), divided.where(is_usable, weight.data)
    if isinstance(bias := getattr(source, "bias", None), nn.Parameter):
        bias.data = (bias.data / scales).to(dtype).float()
    return scales


def find_offset(norm: nn.Module, weight: nn.Parameter) -> float:
    """Return o of a norm that multiplies by o + weight: 0, or 1 for the norms of Gemma."""
    original, bias = weight.data, getattr(norm, "bias", None)
    weight.data = torch.zeros_like(original)
    outputs = norm.forward(torch.arange(1.0, len(original) + 1)) - (0.0 if bias is None else bias)
    weight.data = original
    return float(bool(outputs.any()))
