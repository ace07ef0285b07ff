"""What is refused for an architecture, and why, from the code that refuses it."""

from __future__ import annotations

import tempfile

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Data, Model, Rollout
from alphaapollo.launch.input_checks import check_context_length
from alphaapollo.models.load import load_without_weights
from alphaapollo.models.ulysses import describe_stateful_layers
from tests.architectures.models import MAX_LENGTH, Architecture

ENGINE = "vLLM (CPU)"
COLUMNS = ["packed", "shared prompts", "Ulysses", "checkpointing", ENGINE]


def find_refusals(architecture: Architecture) -> dict[str, str]:
    """Return {column: reason} of what is refused for an architecture, for rows of up to MAX_LENGTH tokens."""
    config = architecture.build_config()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = resolve_model(Model(path=folder), "cpu", MAX_LENGTH)
        try:
            load_without_weights(model)
        except ValueError as error:
            return dict.fromkeys(COLUMNS, str(error))
        stateful = describe_stateful_layers(config)
        refusals = dict.fromkeys(COLUMNS[:3], stateful) if stateful else {}
        try:
            data = Data(max_prompt_length=MAX_LENGTH // 2, max_response_length=MAX_LENGTH // 2)
            check_context_length(model, Rollout(), data)
        except ValueError as error:
            refusals[ENGINE] = str(error).replace(folder, "").strip()
    return refusals
