"""Attention of vision towers on a GPU: one call per layer for all images, and for all windows of Qwen2.5-VL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from alphaapollo.models.attention import NAME_PREFIX, activate_flash_attention_3
from alphaapollo.models.decoder import find_vision_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOWER = NAME_PREFIX + "flash_tower"  # vision towers pass the bounds of images only if the name has "flash"


def use_varlen_attention_in_vision_tower(model: PreTrainedModel) -> None:
    """Let the vision tower of a loaded model, if it has one, compute attention within all images or windows by one call
    of torch's kernel per layer. Its own code makes one call per image or window, and waits for the GPU each time."""
    from transformers import AttentionInterface

    AttentionInterface.register(TOWER, attend_images)
    for module in (module for part in find_vision_modules(model) for module in part.modules()):
        if config := getattr(module, "config", None):
            config._attn_implementation = TOWER


def attend_images(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention between all patches of an image. [b, heads, T, d] each -> [b, T, heads, d].
    cu_seq_lens_q: bounds of n images or windows in T, int32 [n + 1], of up to max_length_q patches (b = 1); None: b
    images of T patches."""
    if cu_seq_lens_q is None or max_length_q is None:
        output = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    from torch.nn.attention.varlen import varlen_attn

    activate_flash_attention_3()
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    packed = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling)
    assert isinstance(packed, Tensor)
    return packed[None], None
