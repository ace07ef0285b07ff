"""Frequencies of rotary position embeddings that depend on the length of a sequence."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from alphaapollo.utils.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fix_rope_frequencies(model: PreTrainedModel, max_length: int) -> None:
    """Choose the frequencies of dynamic and longrope position embeddings once per run, as vLLM does.

    Transformers chooses them in each forward pass by its longest row, so that a row's log-probs would depend on the
    other rows of its micro-batch. `max_length`: tokens of the longest row of the run. Raises ValueError if dynamic
    frequencies would change, which vLLM does not support.
    """
    for name, module in list(model.named_modules()):
        if isinstance(getattr(module, "rope_type", None), str | dict):
            config = copy.deepcopy(module.config)
            config.rope_parameters = fixed = fix_rope_parameters(config.rope_parameters, max_length)
            if "dynamic" in str(module.rope_type) and max_length > config.max_position_embeddings:
                raise ValueError(
                    f"dynamic RoPE ({config.model_type}) is not supported for rows of up to {max_length} tokens. "
                    f"Lower the maximum length to {config.max_position_embeddings} tokens, above which it changes."
                )
            if fixed != module.config.rope_parameters:
                with torch.device(next(model.parameters()).device):
                    fixed_module = type(module)(config)  # model.config, which is exported, stays as it is
                if isinstance(fixed_module.rope_type, str):
                    fixed_module.rope_type = "default"  # transformers no longer reads the length of the longest row
                model.set_submodule(name, fixed_module)


def fix_rope_parameters(parameters: JsonObject, max_length: int) -> JsonObject:
    """Return RoPE parameters, which may be nested by layer type, with the same factors for sequences of any length.

    longrope: the long factors if `max_length` exceeds the original context. dynamic: no scaling.
    """
    fixed: JsonObject = {
        name: fix_rope_parameters(value, max_length) if isinstance(value, dict) else value
        for name, value in parameters.items()
    }
    if fixed.get("rope_type") == "dynamic" and "alpha" not in fixed:  # alpha: a constant scale of Hunyuan
        fixed["rope_type"] = "default"
    elif fixed.get("rope_type") == "longrope":
        chosen = "long" if max_length > fixed["original_max_position_embeddings"] else "short"
        for name in ("factor", "mscale"):  # mscale: of phimoe
            if f"{chosen}_{name}" in fixed:
                fixed[f"short_{name}"] = fixed[f"long_{name}"] = fixed[f"{chosen}_{name}"]
    return fixed
