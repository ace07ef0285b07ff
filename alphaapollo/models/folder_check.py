"""Checks of a model's folder before a worker loads it, from its configuration and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from alphaapollo.config.schema import Model
from alphaapollo.data.images import find_placeholder_ids
from alphaapollo.data.rendering import Renderer, make_template_argument_warnings, make_template_digest
from alphaapollo.models.load import load_config
from alphaapollo.models.vision import load_example_image

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def find_quantization(config: PretrainedConfig) -> str:
    """Return the method with which weights are quantized, e.g. "gptq"; empty if they are not."""
    for section in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if found := getattr(section, name, None):
                values = found if isinstance(found, Mapping) else vars(found)
                return str(values.get("quant_method") or name)
    return ""


def describe_image_input(model: Model) -> tuple[object, ...] | None:
    """Return placeholder tokens and the prepared form of a generated image. None if the model reads no images."""
    image = load_example_image(model)
    if image is None:
        return None
    return find_placeholder_ids(load_config(model)), image.digest, tuple(image.token_ids)


def check_vocabulary_size(model: Model, tokenizer: PreTrainedTokenizerBase, path_key: str) -> None:
    """Raise ValueError if the model lacks an embedding for a token of the tokenizer.

    Special tokens except the end and padding tokens may lack an embedding, because prompts do not use them.
    """
    size = getattr(load_config(model).get_text_config(), "vocab_size", None)
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [index for index in tokenizer.get_vocab().values() if index not in special]
    ids += [index for index in (tokenizer.eos_token_id, tokenizer.pad_token_id) if index is not None]
    if size is not None and ids and max(ids) >= size:
        raise ValueError(
            f"{path_key}={model.path}: the model has {size} embeddings, but the tokenizer has ids up to {max(ids)}. "
            "Use the tokenizer of this model, or a model with enough embeddings."
        )


def list_template_notices(model: Model, renderer: Renderer, template_arguments: Mapping[str, object]) -> list[str]:
    """Return notices about template arguments without effect, another template than that of the training, and control
    strings in the prompts rendered so far."""
    tokenizer = renderer.tokenizer
    notices = make_template_argument_warnings(template_arguments, tokenizer) + renderer.list_control_notices()
    trained = getattr(load_config(model), "chat_template_digest", None)
    if tokenizer.chat_template and trained not in (None, make_template_digest(tokenizer)):
        notices.append(
            f"{model.path} was trained with another chat template than that of {model.tokenizer_path or model.path}, "
            "which usually makes its answers much worse. Use the tokenizer of its training."
        )
    return notices
