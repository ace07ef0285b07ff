"""What is refused for an architecture, and why, from the code that refuses it."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Data, Model, Rollout
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import describe_stateful_layers
from alphaapollo.planning.model_requirements import ModelUse, find_unsupported_features
from tests.architectures.models import MAX_LENGTH, Architecture

ENGINE = "vLLM (CPU)"
COLUMNS = ["packed", "shared prompts", "Ulysses", "checkpointing", ENGINE]


@cache
def find_refusals(architecture: Architecture) -> dict[str, str]:
    """Return {column: reason} of what is refused for an architecture, for rows of up to MAX_LENGTH tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = architecture.save(Path(name))
        model = resolve_model(Model(path=name), "cpu", MAX_LENGTH)
        try:
            tokens = torch.arange(2, 8)[None]
            loaded = load_causal_lm(model, "padded")
            loaded.base_model(input_ids=tokens, position_ids=tokens - 2, use_cache=False)
        except ValueError as error:
            return dict.fromkeys(COLUMNS, str(error).replace(f"model.path={folder}", "model.path"))
        stateful = describe_stateful_layers(loaded.config)
        refusals = dict.fromkeys(COLUMNS[:3], stateful) if stateful else {}
        data = Data(max_prompt_length=MAX_LENGTH // 2, max_response_length=MAX_LENGTH // 2)
        for message in find_unsupported_features(ModelUse("model.path", model, engine=Rollout(), lengths=data)):
            refusals[ENGINE] = message.replace(f"model.path={name}", "model.path")
    return refusals
