"""Attention backends: causal attention over the rows of a micro-batch.

    backend  layout  where
    padded   padded  everywhere: plain causal attention; default on a CPU, where it is fastest for short rows
    sdpa     packed  everywhere: one call per row
    varlen   packed  GPU: torch.nn.attention.varlen
    flex     packed  GPU: FlexAttention with a block mask (its backward pass does not run on a CPU)
    flash    packed  GPU: flash-attn 2, if it is installed (docs/install.md)

With sequence parallelism (models/ulysses.py) each rank computes its part of the heads, for complete rows.

Backends are registered with transformers under new names. Transformers builds no mask for names that it does not know,
so no dense [T, T] mask exists. The model passes `packing` down to the layers as a keyword.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphaapollo.config.resolve import Attention
from alphaapollo.models.attention.shared_prompts import causal_mask, compute_padded_cells, flatten_heads, gather_heads
from alphaapollo.models.micro_batch import Packing
from alphaapollo.models.ulysses import SequenceGroup, exchange_heads_for_tokens, exchange_tokens_for_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "alphaapollo_"  # prefix of our backends among transformers' attention implementations


def register_backend(kind: Attention, compute: Callable[[AttentionCall], Tensor] | None = None) -> str:
    """Register a backend with transformers. Returns the value for `attn_implementation`.

    Args:
        compute: function to register instead of the backend, for the meta device.
    """
    from transformers import AttentionInterface

    name = f"{NAME}{kind}" if compute is None else f"{NAME}meta_{kind}"
    AttentionInterface.register(name, make_attention_interface(compute or BACKENDS[kind]))
    return name


def uses_registered_backend(model: PreTrainedModel) -> bool:
    """Return whether the model uses one of these backends instead of the attention in its own modeling code."""
    return str(model.config._attn_implementation).startswith(NAME)


@dataclass(frozen=True)
class AttentionCall:
    """Inputs of one attention layer."""

    layer: str  # class name of the layer, for messages
    query: Tensor  # [b, heads, T, d]
    key: Tensor  # [b, kv heads, T, d]
    value: Tensor  # [b, kv heads, T, d]
    scaling: float | None = None  # factor of the scores; None: 1 / sqrt(d)
    window: int | None = None  # sliding window: number of tokens that a token attends to, itself included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) (Gemma 2)
    sinks: Tensor | None = None  # [heads] extra score in the softmax without a value (gpt-oss)
    packing: Packing | None = None

    @property
    def is_gqa(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]

    @property
    def packed_rows(self) -> Packing:
        if self.packing is None:
            raise ValueError(
                f"{self.layer} does not pass the boundaries of packed rows to attention, so tokens would attend to "
                "other rows. Set model.attention=padded."
            )
        return self.packing

    def split_by_heads(self, sequence: SequenceGroup) -> AttentionCall:
        """Exchange this rank's part of the tokens for its part of the heads (a collective)."""
        return replace(
            self,
            query=exchange_tokens_for_heads(self.query, sequence),
            key=exchange_tokens_for_heads(self.key, sequence),
            value=exchange_tokens_for_heads(self.value, sequence),
            sinks=None if self.sinks is None else self.sinks.chunk(sequence.size)[sequence.rank],
        )

    def repeat_key_value_heads(self) -> AttentionCall:
        """Repeat keys and values for every query head, for kernels that do not support grouped heads."""
        groups = self.query.shape[1] // self.key.shape[1]
        if groups == 1:
            return self
        return replace(
            self, key=self.key.repeat_interleave(groups, dim=1), value=self.value.repeat_interleave(groups, dim=1)
        )

    def gather_segment_keys(self) -> tuple[Tensor, Tensor]:
        """Gather the keys and the values that each segment attends to, segment after segment. [1, kv heads, sum, d]"""
        keys = self.packed_rows.keys
        if keys is None:
            return self.key, self.value
        index, heads = keys.index[None], self.key.shape[1]
        key, value = flatten_heads(self.key), flatten_heads(self.value)
        return gather_heads(key, index, heads), gather_heads(value, index, heads)

    def check_supported(self, kind: Attention) -> None:
        """Raise ValueError if the layer needs features that the backend does not have."""
        missing = [name for name in _UNSUPPORTED.get(kind, ()) if getattr(self, name) is not None]
        if missing:
            raise ValueError(
                f"{self.layer} needs {' and '.join(missing)}, which model.attention={kind} does not support. "
                "Set model.attention=sdpa."
            )


def make_attention_interface(compute: Callable[[AttentionCall], Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Wrap `compute` in the signature of transformers' attention functions. Dropout is not applied."""

    @torch.compiler.disable  # the kernels depend on Python lists of lengths, so there is nothing to fuse
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        packing: Packing | None = None,
        sequence: SequenceGroup | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        layer = type(module).__name__
        call = AttentionCall(layer, query, key, value, scaling, sliding_window, softcap, s_aux, packing)
        if sequence is None:
            return compute(call), None
        return exchange_heads_for_tokens(compute(call.split_by_heads(sequence)), sequence), None

    return forward


def _attend_padded(call: AttentionCall) -> Tensor:
    call = _prepare_for_sdpa(call)
    if call.packing is not None and call.packing.keys is not None:
        return _attend_segments(call, call.packing)
    return _attend_causal(call, call.query, call.key, call.value).transpose(1, 2).contiguous()


def _attend_segments(call: AttentionCall, packing: Packing) -> Tensor:
    """Compute attention of rows that share prefixes: first padded prefixes, then padded row remainders."""
    cells = compute_padded_cells(packing, call.window)
    query, key, value = (flatten_heads(x) for x in (call.query, call.key, call.value))
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    prefixes = _attend_causal(
        call,
        gather_heads(query, cells.prefixes, heads),
        gather_heads(key, cells.prefixes, kv_heads),
        gather_heads(value, cells.prefixes, kv_heads),
    )
    remainders = _attend(
        call,
        gather_heads(query, cells.remainders, heads),
        gather_heads(key, cells.keys, kv_heads),
        gather_heads(value, cells.keys, kv_heads),
        cells.visible,
    )
    output = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in (prefixes, remainders)])
    return F.embedding(cells.inverse, output).unflatten(1, (heads, -1))[None]


def _attend_sdpa(call: AttentionCall) -> Tensor:
    call = _prepare_for_sdpa(call)
    lengths, key_lengths = call.packed_rows.lengths, (call.packed_rows.keys or call.packed_rows).lengths
    key, value = call.gather_segment_keys()
    rows = zip(call.query.split(lengths, 2), key.split(key_lengths, 2), value.split(key_lengths, 2), strict=True)
    return torch.cat([_attend_causal(call, q, k, v) for q, k, v in rows], dim=2).transpose(1, 2).contiguous()


def _attend_varlen(call: AttentionCall) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    call.check_supported("varlen")
    output = varlen_attn(
        *_make_varlen_arguments(call),
        scale=call.scaling,
        window_size=(-1 if call.window is None else call.window - 1, 0),
        enable_gqa=call.is_gqa,
    )
    assert isinstance(output, Tensor)
    return output[None]


def _attend_flash(call: AttentionCall) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    call.check_supported("flash")
    output: Tensor = flash_attn_varlen_func(
        *_make_varlen_arguments(call),
        softmax_scale=call.scaling,
        causal=True,
        window_size=(-1, -1) if call.window is None else (call.window - 1, 0),
        softcap=call.softcap or 0.0,
    )
    return output[None]


def _make_varlen_arguments(call: AttentionCall) -> tuple[Any, ...]:
    """Return the first arguments of varlen kernels: q, k, v, and cu_seqlens and max_seqlen of q and of k."""
    rows, (key, value) = call.packed_rows, call.gather_segment_keys()
    keys = rows.keys or rows
    tensors = (tensor[0].transpose(0, 1) for tensor in (call.query, key, value))
    return *tensors, rows.cu_seqlens, keys.cu_seqlens, max(rows.lengths), max(keys.lengths)


def _attend_flex(call: AttentionCall) -> Tensor:
    call.check_supported("flex")
    output = _load_flex_kernel(call.query.device.type)(
        call.query,
        call.key,
        call.value,
        score_mod=None if call.softcap is None else _make_score_cap(call.softcap),
        block_mask=_make_block_mask(call.packed_rows, call.window),
        scale=call.scaling,
        enable_gqa=call.is_gqa,
    )
    return output.transpose(1, 2).contiguous()


@lru_cache(maxsize=2)  # shared by the layers of a forward pass: full and sliding-window attention
def _make_block_mask(rows: Packing, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    device, width = rows.cu_seqlens.device, sum(rows.lengths)
    segment = torch.repeat_interleave(rows.cu_seqlens.diff(), output_size=width)
    position = torch.arange(width, device=device) - rows.cu_seqlens[segment]
    prefix = segment
    if rows.keys is not None:
        position += (rows.keys.cu_seqlens.diff() - rows.cu_seqlens.diff())[segment]
        prefix = torch.tensor(rows.keys.prefixes, device=device)[segment]

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = position[query] - position[key]
        allowed = ((segment[query] == segment[key]) | (prefix[query] == segment[key])) & (distance >= 0)
        return allowed if window is None else allowed & (distance < window)

    return create_block_mask(is_visible, None, None, width, width, device=str(device))


@lru_cache
def _load_flex_kernel(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compute: Callable[..., Any] = flex_attention
    return compute if device == "cpu" else torch.compile(compute, dynamic=True)


@lru_cache
def _make_score_cap(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _prepare_for_sdpa(call: AttentionCall) -> AttentionCall:
    """Repeat key and value heads unless a fused SDPA kernel supports grouped heads."""
    if call.softcap is not None or call.sinks is not None:
        return call.repeat_key_value_heads()
    packing = call.packing
    longest = call.query.shape[2] if packing is None else max((packing.keys or packing).lengths)
    has_mask = (call.window is not None and call.window < longest) or (packing is not None and packing.keys is not None)
    return (
        call
        if sdpa_supports_groups(call.query.device.type, call.query.dtype, has_mask)
        else call.repeat_key_value_heads()
    )


def sdpa_supports_groups(device: str, dtype: torch.dtype, has_mask: bool) -> bool:
    """Return whether a fused SDPA kernel supports grouped heads. On a GPU only the flash kernel does. It supports
    neither float32 nor masks, unlike the memory-efficient kernel."""
    return device != "cuda" or (dtype != torch.float32 and not has_mask)


def _attend_causal(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention of rows of equal length. Queries are the last T of S tokens. [b, heads, T, d], keys and
    values [b, heads, S, d] -> [b, heads, T, d]"""
    width, num_keys = query.shape[2], key.shape[2]
    is_plain = width == num_keys and (call.window is None or call.window >= num_keys)
    mask = None if is_plain else causal_mask(width, num_keys, call.window, query.device)
    return _attend(call, query, key, value, mask)


def _attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute masked attention. `mask`: bool, broadcast to [b, heads, T, S]; None: plain causal mask."""
    if call.softcap is not None or call.sinks is not None:
        return attend_explicitly(call, query, key, value, mask)
    settings = {"attn_mask": mask, "is_causal": mask is None, "scale": call.scaling, "enable_gqa": call.is_gqa}
    return scaled_dot_product_attention(query, key, value, **settings)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """Call F.scaled_dot_product_attention, on a CPU in float32 instead of bfloat16, whose backward pass takes up to
    three times as long there (torch 2.13)."""
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        query, key, value = query.float(), key.float(), value.float()
    return F.scaled_dot_product_attention(query, key, value, **settings).to(dtype)


def attend_explicitly(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention of ungrouped heads with score capping or attention sinks, which SDPA does not support."""
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    width = key.shape[2]
    mask = causal_mask(width, width, None, query.device) if mask is None else mask
    scores = scores.masked_fill(~mask, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(dim=-1)[..., :width].to(value.dtype) @ value


_UNSUPPORTED: dict[Attention, tuple[str, ...]] = {
    "varlen": ("softcap", "sinks"),
    "flash": ("sinks",),
    "flex": ("sinks",),
}


BACKENDS: dict[Attention, Callable[[AttentionCall], Tensor]] = {
    "padded": _attend_padded,
    "sdpa": _attend_sdpa,
    "varlen": _attend_varlen,
    "flex": _attend_flex,
    "flash": _attend_flash,
}
