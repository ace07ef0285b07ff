"""Liger's fused GPU kernels for norms, rotary embeddings and gated MLPs. Its loss functions are not used.

Rotary embeddings are replaced in the architecture's module, for all models of that architecture in the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = ("granite", "llama", "qwen2", "qwen3")
"""Architectures for which log-probs and gradients were compared with those of the unfused kernels."""
NO_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def apply_liger(loaded: PreTrainedModel) -> None:
    """Replace kernels of the model if its architecture is supported."""
    from transformers.integrations.liger import apply_liger_kernel

    if loaded.config.model_type in ARCHITECTURES:
        apply_liger_kernel(loaded, NO_LOSSES)
