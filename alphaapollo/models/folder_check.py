"""Checks of a model folder before a worker loads it: complete weights, matching shapes and a sufficient vocabulary.

The checks read only the headers of weight files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from alphaapollo.config.schema import Model
from alphaapollo.data.images import find_placeholder_ids
from alphaapollo.data.rendering import Renderer, make_template_argument_warnings, make_template_digest
from alphaapollo.models.load import has_custom_code, load_config, load_without_weights
from alphaapollo.models.vision import load_example_image

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


def check_weight_files(model: Model, path_key: str, engine: str = "") -> None:
    """Check the weights of a model. Raises ValueError if they are quantized, which only vLLM loads, or if files of a
    local folder are truncated or missing, or shapes or layers differ from config.json.

    path_key: config key of the folder, for messages. engine: rollout.name of a model that is not trained.
    """
    if not model.path:
        return
    folder, path_setting, config = Path(model.path).expanduser(), f"{path_key}={model.path}", load_config(model)
    shapes = _read_tensor_shapes(folder, path_setting) if folder.is_dir() else {}
    method = _find_quantization(config, shapes)
    if method and engine != "vllm":
        raise ValueError(
            f"{path_setting}: the weights are quantized ({method}), and only engines of vLLM load such weights. "
            "Use the original model in bfloat16, from which the quantized one was made."
        )
    if method or not shapes or has_custom_code(model, config):
        return
    expected = load_without_weights(model)
    for name, parameter in expected.state_dict().items():
        if name in shapes and shapes[name] != list(parameter.shape):
            raise ValueError(
                f"{path_setting}: {name} has shape {shapes[name]} in the weights, but {list(parameter.shape)} in "
                "config.json. Use weights and configuration of the same model."
            )
    text = config.get_text_config()
    num_layers: int | None = getattr(text, "num_hidden_layers", None)
    if num_layers is None or getattr(text, "num_nextn_predict_layers", None):  # multi-token prediction adds layers
        return
    ignored = getattr(expected, "_keys_to_ignore_on_load_unexpected", None) or ()
    names = [name for name in shapes if not any(re.search(pattern, name) for pattern in ignored)]
    count = max((int(match[1]) + 1 for name in names if (match := LAYER.match(name))), default=0)
    if count > num_layers:  # transformers would ignore the additional layers
        raise ValueError(
            f"{path_setting}: the weights have {count} layers, but config.json has num_hidden_layers={num_layers}. Use "
            "weights and configuration of the same model."
        )


def _find_quantization(config: PretrainedConfig, shapes: Iterable[str]) -> str:
    """Return the method with which weights are quantized, e.g. "gptq"; empty if they are not."""
    for section in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if found := getattr(section, name, None):
                values = found if isinstance(found, Mapping) else vars(found)
                return str(values.get("quant_method") or name)
    return next((name for name in shapes if name.endswith((".qweight", ".weight_packed"))), "")


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


def _read_tensor_shapes(folder: Path, path_setting: str) -> dict[str, list[int]]:
    """Read the tensor shapes from safetensors files; {} if the weights are in another format."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    name = INDEX
    try:
        names = [SINGLE] if (folder / SINGLE).is_file() else []
        if (folder / INDEX).is_file():
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        for name in names:
            with safe_open(folder / name, "pt") as tensors:
                shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path_setting}: {name} is missing or damaged: {error}. Copy the model again.") from None
    return shapes
