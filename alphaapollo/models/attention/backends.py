"""Attention over the rows of a micro-batch, each row seeing only itself and only the past.

    kind     layout  where
    padded   padded  anywhere: plain causal attention; the CPU's default, fastest for short rows there
    sdpa     packed  anywhere: one call a row
    varlen   packed  GPU: torch.nn.attention.varlen
    flex     packed  GPU: FlexAttention with a block mask (on a CPU it has no backward)
    flash    packed  GPU: flash-attn 2, where somebody built it (docs/install.md)

Where ranks share sequences (ulysses.py) each computes its part of the heads, of whole rows.

Each is registered with transformers under a name of its own. Transformers builds no mask for names that it does not
know, so no dense [T, T] mask ever exists; rows are told apart by `packing`, which the model hands down as a keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphaapollo.config.resolve import Attention
from alphaapollo.models.attention.shared_prompts import by_heads, padded_cells, tokens_of, visible
from alphaapollo.models.cpu.attention import scaled_dot_product_attention
from alphaapollo.models.micro_batch import MicroBatch, Packing
from alphaapollo.models.ulysses import SequenceGroup, heads_of_all_tokens, tokens_of_all_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "alphaapollo_"  # with which our names begin among transformers' kinds of attention


def register(kind: Attention) -> str:
    """Make the attention known to transformers; returns the name to load a model with."""
    from transformers import AttentionInterface

    name = f"{NAME}{kind}"
    AttentionInterface.register(name, _interface(_COMPUTE[kind]))
    return name


def is_ours(model: PreTrainedModel) -> bool:
    """Whether the model's attention is one of these, not that of its own code."""
    return str(model.config._attn_implementation).startswith(NAME)


def attend(
    kind: Attention, query: Tensor, key: Tensor, value: Tensor, packing: Packing | None, window: int | None = None
) -> Tensor:
    """One kind by itself. query [b, heads, T, d], key and value [b, kv heads, T, d] -> [b, T, heads, d]."""
    call = _Call("attend", query, key, value, None, window, None, None, packing)
    return _COMPUTE[kind](call)


def register_meta(kind: Attention) -> str:
    """The same for tensors without data: it keeps what `kind` keeps, and refuses what that does not compute
    (models/activations.py)."""
    from transformers import AttentionInterface

    name = f"{NAME}meta_{kind}"
    AttentionInterface.register(name, _interface(partial(_meta, kind)))
    return name


def trunk_arguments(micro: MicroBatch) -> dict[str, Any]:
    """Keywords that the trunk hands down to each layer. The cu_seq_lens ones are also transformers' own names, which
    layers without attention (convolutions, recurrences) read."""
    packing, shared = micro.packing, {"sequence": micro.sequence} if micro.sequence else {}
    if packing is None:
        return shared
    return shared | {
        "packing": packing,
        "cu_seq_lens_q": packing.cu_seqlens,
        "cu_seq_lens_k": packing.cu_seqlens,
        "max_length_q": packing.max_length,
        "max_length_k": packing.max_length,
    }


@dataclass(frozen=True)
class _Call:
    """One attention layer's inputs."""

    layer: str  # the layer's class, for messages
    query: Tensor  # [b, heads, T, d]
    key: Tensor  # [b, kv heads, T, d]
    value: Tensor  # as key
    scaling: float | None  # of the scores; None: 1 / sqrt(d)
    window: int | None  # tokens that a token sees, itself included
    softcap: float | None  # scores are softcap * tanh(scores / softcap) (Gemma 2)
    sinks: Tensor | None  # [heads] a score that takes part in the softmax and adds nothing (gpt-oss)
    packing: Packing | None

    @property
    def is_grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]

    @property
    def rows(self) -> Packing:
        if self.packing is None:
            raise ValueError(
                f"{self.layer} does not pass on where packed rows begin, so their tokens would see each other. "
                "Set model.attention=padded."
            )
        return self.packing

    def by_heads(self, sequence: SequenceGroup) -> _Call:
        """This rank's heads of whole rows, from its part of the rows."""
        return replace(
            self,
            query=heads_of_all_tokens(self.query, sequence),
            key=heads_of_all_tokens(self.key, sequence),
            value=heads_of_all_tokens(self.value, sequence),
            sinks=None if self.sinks is None else self.sinks.chunk(sequence.size)[sequence.rank],
        )

    def ungrouped(self) -> _Call:
        """With a key and a value for every query head, for kernels that do not know grouped heads."""
        groups = self.query.shape[1] // self.key.shape[1]
        if groups == 1:
            return self
        return replace(
            self, key=self.key.repeat_interleave(groups, dim=1), value=self.value.repeat_interleave(groups, dim=1)
        )

    def seen(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens that each segment sees, segment after segment. [1, kv heads, sum, d]"""
        keys = self.rows.keys
        if keys is None:
            return self.key, self.value
        index, heads = keys.index[None], self.key.shape[1]
        return by_heads(tokens_of(self.key), index, heads), by_heads(tokens_of(self.value), index, heads)

    def refuse(self, kind: Attention) -> None:
        """ValueError: the layer needs what this kind does not compute."""
        asked = [name for name in _UNKNOWN_TO.get(kind, ()) if getattr(self, name) is not None]
        if asked:
            raise ValueError(
                f"{self.layer} needs {' and '.join(asked)}, which model.attention={kind} does not compute. "
                "Set model.attention=sdpa."
            )


def _interface(compute: Callable[[_Call], Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """`compute` in the form in which transformers calls attention; dropout is never applied."""

    @torch.compiler.disable  # kernels of their own, told apart by lists of lengths: nothing to fuse
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
        call = _Call(layer, query, key, value, scaling, sliding_window, softcap, s_aux, packing)
        if sequence is None:
            return compute(call), None
        return tokens_of_all_heads(compute(call.by_heads(sequence)), sequence), None

    return forward


def _padded(call: _Call) -> Tensor:
    """-> [b, T, heads, d], as the others."""
    call = _for_sdpa(call)
    if call.packing is not None and call.packing.keys is not None:
        return _padded_segments(call, call.packing)
    return _causal(call, call.query, call.key, call.value).transpose(1, 2).contiguous()


def _padded_segments(call: _Call, packing: Packing) -> Tensor:
    """Of rows that share prefixes, which have no padding outside of attention: prefixes by themselves, then the rest of
    the rows, each group padded to its longest."""
    cells = padded_cells(packing, call.window)
    query, key, value = (tokens_of(x) for x in (call.query, call.key, call.value))
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    prefixes = _causal(
        call,
        by_heads(query, cells.prefixes, heads),
        by_heads(key, cells.prefixes, kv_heads),
        by_heads(value, cells.prefixes, kv_heads),
    )
    rests = _attend(
        call,
        by_heads(query, cells.rests, heads),
        by_heads(key, cells.keys, kv_heads),
        by_heads(value, cells.keys, kv_heads),
        cells.visible,
    )
    output = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in (prefixes, rests)])
    return F.embedding(cells.back, output).unflatten(1, (heads, -1))[None]


def _sdpa(call: _Call) -> Tensor:
    call = _for_sdpa(call)
    lengths, seen = call.rows.lengths, call.rows.lengths if call.rows.keys is None else call.rows.keys.lengths
    key, value = call.seen()
    rows = zip(call.query.split(lengths, 2), key.split(seen, 2), value.split(seen, 2), strict=True)
    return torch.cat([_causal(call, q, k, v) for q, k, v in rows], dim=2).transpose(1, 2).contiguous()


def _varlen(call: _Call) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    call.refuse("varlen")
    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # new in torch 2.12
    call = call if takes_groups else call.ungrouped()
    groups: dict[str, Any] = {"enable_gqa": call.is_grouped} if takes_groups else {}
    rows, (key, value) = call.rows, call.seen()
    seen = rows.keys or rows
    output = varlen_attn(
        call.query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        rows.cu_seqlens,
        seen.cu_seqlens,
        rows.max_length,
        seen.max_length,
        scale=call.scaling,
        window_size=(-1 if call.window is None else call.window - 1, 0),
        **groups,
    )
    assert isinstance(output, Tensor)
    return output[None]


def _flash(call: _Call) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    call.refuse("flash")
    rows, (key, value) = call.rows, call.seen()
    seen = rows.keys or rows
    output: Tensor = flash_attn_varlen_func(
        call.query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        rows.cu_seqlens,
        seen.cu_seqlens,
        rows.max_length,
        seen.max_length,
        softmax_scale=call.scaling,
        causal=True,
        window_size=(-1, -1) if call.window is None else (call.window - 1, 0),
        softcap=call.softcap or 0.0,
    )
    return output[None]


def _flex(call: _Call) -> Tensor:
    call.refuse("flex")
    output = _flex_function(call.query.device.type)(
        call.query,
        call.key,
        call.value,
        score_mod=None if call.softcap is None else _cap_scores(call.softcap),
        block_mask=_block_mask(call.rows, call.window),
        scale=call.scaling,
        enable_gqa=call.is_grouped,
    )
    return output.transpose(1, 2).contiguous()


@lru_cache(maxsize=2)  # the layers of one forward share their masks: full and windowed attention
def _block_mask(rows: Packing, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    device, width = rows.cu_seqlens.device, sum(rows.lengths)
    segment = torch.repeat_interleave(rows.cu_seqlens.diff(), output_size=width)
    position = torch.arange(width, device=device) - rows.cu_seqlens[segment]
    prefix = segment
    if rows.keys is not None:
        position += (rows.keys.cu_seqlens.diff() - rows.cu_seqlens.diff())[segment]
        prefix = torch.tensor(rows.keys.prefixes, device=device)[segment]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = ((segment[query] == segment[key]) | (prefix[query] == segment[key])) & (position[query] >= position[key])
        return seen if window is None else seen & (position[query] - position[key] < window)

    return create_block_mask(sees, None, None, width, width, device=str(device))


@lru_cache
def _flex_function(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    plain: Callable[..., Any] = flex_attention
    return plain if device == "cpu" else compiled


@lru_cache
def _cap_scores(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _for_sdpa(call: _Call) -> _Call:
    """With whole heads where we write the scores out, and where SDPA otherwise would: [heads, T, T]."""
    if call.softcap is not None or call.sinks is not None:
        return call.ungrouped()
    packing = call.packing
    longest = call.query.shape[2] if packing is None else (packing.keys or packing).max_length
    has_mask = (call.window is not None and call.window < longest) or (packing is not None and packing.keys is not None)
    return call if sdpa_knows_groups(call.query.device.type, call.query.dtype, has_mask) else call.ungrouped()


def sdpa_knows_groups(device: str, dtype: torch.dtype, has_mask: bool) -> bool:
    """On a GPU only its flash kernel knows grouped heads, and that takes neither float32 nor a mask; the memory-
    efficient kernel takes both."""
    return device != "cuda" or (dtype != torch.float32 and not has_mask)


def _causal(call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of rows of one width, whose queries are the last tokens of their keys. query [b, heads, T, d],
    keys [b, heads, S, d] -> [b, heads, T, d]."""
    width, seen = query.shape[2], key.shape[2]
    is_plain = width == seen and (call.window is None or call.window >= seen)
    return _attend(call, query, key, value, None if is_plain else visible(width, seen, call.window, query.device))


def _attend(call: _Call, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
    """seen: bool, broadcast to [b, heads, T, S]: which keys a query sees; None: plain causal."""
    if call.softcap is not None or call.sinks is not None:
        return _explicit(call, query, key, value, seen)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=call.scaling, enable_gqa=call.is_grouped
    )


def _explicit(call: _Call, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
    """Attention written out, for score capping and attention sinks, which SDPA does not know; of ungrouped heads."""
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    width = key.shape[2]
    scores = scores.masked_fill(~(visible(width, width, None, query.device) if seen is None else seen), float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(dim=-1)[..., :width].to(value.dtype) @ value


def _meta(kind: Attention, call: _Call) -> Tensor:
    """-> [b, T, heads, d]."""
    call.refuse(kind)
    if kind in ("padded", "sdpa") and (call.softcap is not None or call.sinks is not None):
        call = call.ungrouped()
        return _explicit(call, call.query, call.key, call.value, None).transpose(1, 2).contiguous()
    output: Tensor = _Fused.apply(call.query, call.key, call.value)
    return output


_UNKNOWN_TO: dict[Attention, tuple[str, ...]] = {
    "varlen": ("softcap", "sinks"),
    "flash": ("sinks",),
    "flex": ("sinks",),
}


class _Fused(torch.autograd.Function):
    """Shapes of a fused kernel: forward keeps inputs, output and one number a row of scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, width, size = query.shape
        output = query.new_empty(batch, width, heads, size)
        ctx.save_for_backward(query, key, value, output, query.new_empty(batch, heads, width, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_COMPUTE: dict[Attention, Callable[[_Call], Tensor]] = {
    "padded": _padded,
    "sdpa": _sdpa,
    "varlen": _varlen,
    "flex": _flex,
    "flash": _flash,
}
