"""Liger's fused kernels for a model's norms, rotations and gates, on a GPU; its losses are not used.

They are put into the model by transformers' own hook. Rotations are replaced in the architecture's module: every model
of that architecture in the process computes them so from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = ("granite", "llama", "qwen2", "qwen3")
"""Those whose log-probs and gradients were compared with the plain ones."""
NO_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def fuse(loaded: PreTrainedModel) -> None:
    """Put them into a model of one of the architectures; others stay as they are."""
    from transformers.integrations.liger import apply_liger_kernel

    if loaded.config.model_type in ARCHITECTURES:
        apply_liger_kernel(loaded, NO_LOSSES)
