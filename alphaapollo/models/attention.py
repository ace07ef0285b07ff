"""Attention backends: causal attention over the rows (token sequences) of a micro-batch.

    backend  layout  where
    padded   padded  everywhere: causal attention; default on a CPU, where it is fastest for short rows
    sdpa     packed  everywhere: one call per row
    varlen   packed  GPU: torch.nn.attention.varlen, with FlashAttention 3 if it is installed and the GPU is a Hopper
    flash    packed  GPU: flash-attn 2, if it is installed (docs/install.md)

With sequence parallelism (ulysses.py) each rank computes its part of the heads, for complete rows.

Backends are registered with transformers under new names, for which transformers builds no dense [T, T] mask.
The layers receive the boundaries of packed rows as the keyword argument `packing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphaapollo.config.resolve import Attention, has_flash_attn_3
from alphaapollo.models.cpu_attention import MAX_KEYS, attend_with_products
from alphaapollo.models.decoder import find_language_model
from alphaapollo.models.micro_batch import Packing
from alphaapollo.models.ulysses import SequenceGroup, exchange_heads_for_tokens, exchange_tokens_for_heads

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NAME_PREFIX = "alphaapollo_"  # our backends' names begin with it among transformers' attention implementations


def register_attn_implementation(backend: Attention) -> str:
    """Register an attention backend with transformers. Returns its name for `attn_implementation`."""
    from transformers import AttentionInterface

    # Transformers takes names that contain "sdpa" or "flash" for its own backends, which some models do not support.
    name = NAME_PREFIX + backend.replace("sdpa", "rows").replace("flash", "fa2")
    AttentionInterface.register(name, make_attention_interface(BACKENDS[backend]))
    return name


def uses_alphaapollo_backend(model: PreTrainedModel) -> bool:
    """Return whether the model uses a backend of this module instead of the attention in its own modeling code."""
    return str(find_language_model(model).config._attn_implementation).startswith(NAME_PREFIX)


@dataclass(frozen=True)
class AttentionCall:
    """Inputs and options of one call of an attention layer."""

    layer_class: str  # for messages
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
    def required_packing(self) -> Packing:
        if self.packing is None:
            raise ValueError(
                f"{self.layer_class} does not pass sequence boundaries to attention, so packed sequences would attend "
                "to each other. Set model.attention=padded."
            )
        return self.packing

    def exchange_tokens_for_heads(self, sequence: SequenceGroup) -> AttentionCall:
        """Exchange this rank's part of the tokens for its part of the heads (an all-to-all in the sequence group)."""
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
        key, value = (x.repeat_interleave(groups, dim=1) for x in (self.key, self.value))
        return replace(self, key=key, value=value)

    def gather_segment_keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Gather the keys and values that each segment of packed rows attends to (see SegmentAttentionKeys), in segment
        order. Without shared prompts they are unchanged. [1, kv heads, sum of lengths, d]"""
        keys = self.required_packing.keys
        if keys is None:
            return self.key, self.value
        index, heads = keys.positions[None], self.key.shape[1]
        key, value = flatten_heads(self.key), flatten_heads(self.value)
        return gather_and_split_heads(key, index, heads), gather_and_split_heads(value, index, heads)

    def check_supported_by(self, backend: Attention) -> None:
        """Raise ValueError if the layer needs features that the backend does not have, e.g. attention sinks."""
        missing = [name for name in _UNSUPPORTED.get(backend, ()) if getattr(self, name) is not None]
        if missing:
            raise ValueError(
                f"{self.layer_class} needs {' and '.join(missing)}, which model.attention={backend} does not support. "
                "Set model.attention=sdpa."
            )


def make_attention_interface(attend: Callable[[AttentionCall], Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function for transformers that calls `attend`. Dropout is not applied."""

    @torch.compiler.disable  # the kernels depend on Python lists of lengths, so there is nothing to fuse
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        packing: Packing | None = None,
        sequence: SequenceGroup | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:  # transformers builds none for these backends
            raise ValueError(
                f"{type(module).__name__} has its own attention mask (e.g. sparse attention), which is not supported. "
                "Choose another model."
            )
        # Some models apply the window only in their mask.
        window = options["sliding_window"] if "sliding_window" in options else find_configured_window(module)
        call = AttentionCall(type(module).__name__, query, key, value, scaling, window, softcap, s_aux, packing)
        if sequence is None:
            return attend(call), None
        return exchange_heads_for_tokens(attend(call.exchange_tokens_for_heads(sequence)), sequence), None

    return forward


def find_configured_window(module: nn.Module) -> int | None:
    """Return the layer's sliding window from config.json, as transformers does, for models that apply the window with a
    mask and do not pass it to attention (qwen2_moe, phimoe, doge). None for layers with full attention."""
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _attend_padded(call: AttentionCall) -> Tensor:
    call = _prepare_for_sdpa(call)
    if call.packing is not None and call.packing.keys is not None:
        return _attend_shared_prompts(call, call.packing)
    return _attend_causal(call, call.query, call.key, call.value).transpose(1, 2).contiguous()


def _attend_shared_prompts(call: AttentionCall, packing: Packing) -> Tensor:
    """Compute attention in two padded batches: prompts, then the rest of each row, which also attends to its prompt."""
    padded = compute_padded_indices(packing, call.window)
    query, key, value = (flatten_heads(x) for x in (call.query, call.key, call.value))
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    prompts = _attend_causal(
        call,
        gather_and_split_heads(query, padded.prompts, heads),
        gather_and_split_heads(key, padded.prompts, kv_heads),
        gather_and_split_heads(value, padded.prompts, kv_heads),
    )
    suffixes = _attend_masked(
        call,
        gather_and_split_heads(query, padded.suffixes, heads),
        gather_and_split_heads(key, padded.suffix_keys, kv_heads),
        gather_and_split_heads(value, padded.suffix_keys, kv_heads),
        padded.suffix_mask,
    )
    output = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in (prompts, suffixes)])
    return F.embedding(padded.token_positions, output).unflatten(1, (heads, -1))[None]


def _attend_sdpa(call: AttentionCall) -> Tensor:
    call = _prepare_for_sdpa(call)
    packing, (key, value) = call.required_packing, call.gather_segment_keys_and_values()
    key_lengths = (packing.keys or packing).lengths
    parts = call.query.split(packing.lengths, 2), key.split(key_lengths, 2), value.split(key_lengths, 2)
    outputs = [_attend_causal(call, q, k, v) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _attend_varlen(call: AttentionCall) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    call.check_supported_by("varlen")
    activate_flash_attention_3()
    output = varlen_attn(
        *_make_varlen_arguments(call),
        scale=call.scaling,
        window_size=(-1 if call.window is None else call.window - 1, 0),
        enable_gqa=call.is_gqa,
    )
    assert isinstance(output, Tensor)
    return output[None]


@lru_cache
def activate_flash_attention_3() -> bool:
    """Let torch's attention kernels use FlashAttention 3, if it is installed (docs/install.md) and the GPU is a Hopper.
    Returns whether they do."""
    if not has_flash_attn_3() or torch.cuda.get_device_capability()[0] != 9:
        return False
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return True


def _attend_flash(call: AttentionCall) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    call.check_supported_by("flash")
    output: Tensor = flash_attn_varlen_func(
        *_make_varlen_arguments(call),
        softmax_scale=call.scaling,
        causal=True,
        window_size=(-1, -1) if call.window is None else (call.window - 1, 0),
        softcap=call.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output[None]


def _make_varlen_arguments(call: AttentionCall) -> tuple[Any, ...]:
    """Return (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) for a variable-length kernel."""
    packing, (key, value) = call.required_packing, call.gather_segment_keys_and_values()
    key_packing = packing.keys or packing
    tensors = (tensor[0].transpose(0, 1) for tensor in (call.query, key, value))
    return *tensors, packing.cu_seqlens, key_packing.cu_seqlens, max(packing.lengths), max(key_packing.lengths)


def _prepare_for_sdpa(call: AttentionCall) -> AttentionCall:
    """Repeat key and value heads unless SDPA has a fused kernel for grouped heads."""
    if call.softcap is not None or call.sinks is not None:
        return call.repeat_key_value_heads()
    packing = call.packing
    longest = call.query.shape[2] if packing is None else max((packing.keys or packing).lengths)
    has_mask = (call.window is not None and call.window < longest) or (packing is not None and packing.keys is not None)
    is_supported = sdpa_supports_grouped_heads(call.query.device.type, call.query.dtype, has_mask)
    return call if is_supported else call.repeat_key_value_heads()


def sdpa_supports_grouped_heads(device: str, dtype: torch.dtype, has_mask: bool) -> bool:
    """Return whether a fused SDPA kernel supports grouped-query attention. On a GPU only the flash kernel does, and it
    supports neither float32 nor masks."""
    return device != "cuda" or (dtype != torch.float32 and not has_mask)


def _attend_causal(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention in which the T queries are the last of S tokens. query [b, heads, T, d], key and value
    [b, heads, S, d] -> [b, heads, T, d]"""
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_plain = num_queries == num_keys and (call.window is None or call.window >= num_keys)
    mask = None if is_plain else make_causal_mask(num_queries, num_keys, call.window, query.device)
    return _attend_masked(call, query, key, value, mask)


def _attend_masked(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute masked attention. `mask`: bool, broadcast to [b, heads, T, S]; None: causal mask (T = S)."""
    if call.softcap is not None or call.sinks is not None:
        return attend_eager(call, query, key, value, mask)
    if query.device.type == "cpu" and (num_keys := key.shape[2]) <= MAX_KEYS and query.dtype != torch.float64:
        mask = make_causal_mask(num_keys, num_keys, None, key.device) if mask is None else mask
        return attend_with_products(query, key, value, mask, call.scaling)
    settings = {"attn_mask": mask, "is_causal": mask is None, "scale": call.scaling, "enable_gqa": call.is_gqa}
    return scaled_dot_product_attention(query, key, value, **settings)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """Call F.scaled_dot_product_attention. On a CPU, compute bfloat16 inputs in float32, because bfloat16 makes the
    backward pass up to three times as slow (torch 2.13)."""
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        query, key, value = query.float(), key.float(), value.float()
    return F.scaled_dot_product_attention(query, key, value, **settings).to(dtype)


def attend_eager(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention with score capping or attention sinks, which SDPA does not support. Keys and values must have
    as many heads as queries."""
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    num_keys = key.shape[2]
    mask = make_causal_mask(num_keys, num_keys, None, query.device) if mask is None else mask
    scores = scores.masked_fill(~mask, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(dim=-1)[..., :num_keys].to(value.dtype) @ value


@dataclass(frozen=True)
class PaddedIndices:
    """Indices that gather packed tokens into padded matrices, for attention over b rows that share f prompts. A row's
    suffix is its part after the prompt. Padding repeats the last token of a prompt or suffix. Its output is unused."""

    prompts: Tensor  # int64 [f, P]: tokens of each shared prompt
    suffixes: Tensor  # int64 [b, C]: tokens of each suffix
    suffix_keys: Tensor  # int64 [b, P + C]: tokens of the row's prompt, then of its suffix
    suffix_mask: Tensor  # bool [b, 1, C, P + C]: true where a suffix's token attends to a key
    token_positions: Tensor  # int64 [sum T]: position of each token in the flattened `prompts`, then `suffixes`


@lru_cache(maxsize=2)  # shared by the layers of a forward pass: full and sliding-window attention
def compute_padded_indices(packing: Packing, window: int | None) -> PaddedIndices:
    """Find the packed token of each cell of the padded matrices of prompts and suffixes, and make the attention mask.
    `window`: sliding window in tokens, or None."""
    assert packing.keys is not None, "rows without shared prompts are padded when the batch is built"
    lengths, prefix_index = np.array(packing.lengths), np.array(packing.keys.prefix_segments)
    starts = np.cumsum(lengths) - lengths
    segments = np.arange(len(lengths))
    prefixes, suffixes = segments[prefix_index == segments], segments[prefix_index != segments]
    prefix_lengths = lengths[prefix_index[suffixes]]
    prefix_tokens = _pad_token_ranges(starts[prefixes], lengths[prefixes])
    suffix_tokens = _pad_token_ranges(starts[suffixes], lengths[suffixes])
    row_prefix_tokens = _pad_token_ranges(starts[prefix_index[suffixes]], prefix_lengths)
    query, key = np.arange(suffix_tokens.shape[1]), np.arange(row_prefix_tokens.shape[1])
    is_prefix_visible = np.broadcast_to(key < prefix_lengths[:, None, None], (len(suffixes), len(query), len(key)))
    distance = query[:, None] - query
    is_suffix_visible = np.broadcast_to(distance >= 0, (len(suffixes), *distance.shape))
    if window is not None:
        is_prefix_visible = is_prefix_visible & (prefix_lengths[:, None, None] + query[:, None] - key < window)
        is_suffix_visible = is_suffix_visible & (distance < window)
    mask = np.concatenate([is_prefix_visible, is_suffix_visible], axis=2)
    cell_tokens = np.concatenate([prefix_tokens.ravel(), suffix_tokens.ravel()])
    positions = np.empty(lengths.sum(), dtype=np.int64)
    positions[cell_tokens[::-1]] = np.arange(len(cell_tokens))[::-1]  # a token that padding repeats gets its first cell
    device = packing.cu_seqlens.device
    return PaddedIndices(
        prompts=torch.from_numpy(prefix_tokens).to(device),
        suffixes=torch.from_numpy(suffix_tokens).to(device),
        suffix_keys=torch.from_numpy(np.concatenate([row_prefix_tokens, suffix_tokens], axis=1)).to(device),
        suffix_mask=torch.from_numpy(mask[:, None]).to(device),
        token_positions=torch.from_numpy(positions).to(device),
    )


def make_causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Make a causal mask, with queries only at the last num_queries of the num_keys tokens. Returns bool
    [num_queries, num_keys], true where a query attends to a key. `window`: sliding window in tokens."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = query[:, None] - torch.arange(num_keys, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def flatten_heads(x: Tensor) -> Tensor:
    """Reshape [1, heads, T, d] -> [T, heads x d]."""
    return x[0].transpose(0, 1).flatten(1)


def gather_and_split_heads(tokens: Tensor, indices: Tensor, num_heads: int) -> Tensor:
    """Gather tokens [T, heads x d] by their indices [b, w], and separate the heads -> [b, heads, w, d].

    F.embedding has a backward pass that is fast on a CPU and deterministic on a GPU.
    """
    return F.embedding(indices, tokens).unflatten(2, (num_heads, -1)).transpose(1, 2)


def _pad_token_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the token indices of n ranges, each padded by repeating its last index. [n], [n] -> [n, longest]"""
    return starts[:, None] + np.minimum(np.arange(lengths.max(initial=1)), lengths[:, None] - 1)


_UNSUPPORTED: dict[Attention, tuple[str, ...]] = {"varlen": ("softcap", "sinks"), "flash": ("sinks",)}


def find_unsupported_features(text_config: PretrainedConfig, backend: Attention) -> list[str]:
    """Return the features that a model's attention needs and the backend does not have."""
    needs = {
        "softcap": getattr(text_config, "attn_logit_softcapping", None) is not None,
        "sinks": text_config.model_type.startswith("gpt_oss"),
    }
    return [name for name in _UNSUPPORTED.get(backend, ()) if needs[name]]


BACKENDS: dict[Attention, Callable[[AttentionCall], Tensor]] = {
    "padded": _attend_padded,
    "sdpa": _attend_sdpa,
    "varlen": _attend_varlen,
    "flash": _attend_flash,
}
