"""Loading of causal language models and reward models, from a local folder or the Hugging Face hub."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Model
from alphaapollo.data.images import reads_images
from alphaapollo.models.attention import register_attn_implementation
from alphaapollo.models.decoder import find_decoder_layers, find_vision_blocks
from alphaapollo.models.ulysses import describe_stateful_layers
from alphaapollo.utils.hub import is_local_path
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from alphaapollo.data.images import find_placeholder_ids
from alphaapollo.data.rendering import Renderer, make_template_argument_warnings, make_template_digest
from alphaapollo.models.decoder import load_example_image

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


COMPILER = "inductor"  # torch's own: Triton on a GPU, C++ on a CPU
LIGER_ARCHITECTURES = ("granite", "llama", "qwen2", "qwen3")
"""Architectures for which log-probs and gradients were compared with and without Liger's kernels."""


def load_causal_lm(model: Model, attention: Attention, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a causal language model, or a vision-language model, without dropout: its weights on the CPU, or only its
    structure.

    Args:
        dtype: dtype of the parameters, which are meta tensors. None: load the weights, in the dtypes of their files.

    Raises ValueError if the model cannot be read, is not a causal language model, or lacks weights.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = load_config(model)
    auto_class, custom_code = "AutoModelForCausalLM", has_custom_code(model, config)
    if not custom_code and reads_images(config):
        auto_class = "AutoModelForImageTextToText"
    elif not custom_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model.path={model.path} is a {config.model_type!r} model, which is not a causal language model. "
            "Choose a model that AutoModelForCausalLM loads."
        )
    loaded = _load_model(auto_class, config, model, attention, dtype)
    _enable_gradient_checkpointing(loaded, model)
    return loaded


def load_without_weights(model: Model, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a causal language model on the meta device, without weights. Raises the errors of load_causal_lm."""
    plain = {"enable_gradient_checkpointing": False, "use_torch_compile": False, "use_liger": False}
    return load_causal_lm(model.model_copy(update=plain), "padded", dtype)


def load_reward_model(model: Model, attention: Attention, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a trained reward model: a decoder with a linear head `score`, as transformers saves it.

    Arguments and errors are those of load_causal_lm. It is also an error if there is no trained head with one output.
    """
    config = load_config(model)
    loaded = _load_model(find_reward_model_class(config, model.path), config, model, attention, dtype)
    if not isinstance(getattr(loaded, "score", None), torch.nn.Linear):
        raise ValueError(
            f"model.path={model.path}: {type(loaded).__name__} has no linear head named `score` on a decoder. Choose a "
            "reward model that is built on a causal language model."
        )
    return loaded


def load_or_init_reward_model(
    model: Model, attention: Attention, dtype: torch.dtype | None, seed: int
) -> PreTrainedModel:
    """Load a model for reward-model training: a trained reward model, or a causal language model, which gets a new head
    `score` initialized with `seed`. Other arguments and errors are those of load_reward_model."""
    config = load_config(model)
    if not is_causal_lm(config):
        loaded = load_reward_model(model, attention, dtype)
    else:
        config.num_labels = 1
        config.pad_token_id = _find_pad_token_id(config, model)
        auto_class = "AutoModelForSequenceClassification"
        loaded = _load_model(auto_class, config, model, attention, dtype, new_weights={"score.weight"})
        if dtype is None:
            init_scalar_head(cast("torch.nn.Linear", loaded.score.float()), derive_seed(seed, "score_head"))
    _enable_gradient_checkpointing(loaded, model)
    return loaded


def init_scalar_head(head: torch.nn.Linear, seed: int) -> None:
    """Initialize the weights of a head with one output from N(0, 1 / (H + 1)^2). Its first outputs are near zero."""
    generator = torch.Generator().manual_seed(seed)
    head.weight.data.copy_(torch.randn(1, head.in_features, generator=generator) / (head.in_features + 1))


def is_causal_lm(config: PretrainedConfig) -> bool:
    """Return whether a model is a language model, i.e. its config.json names no classifier as architecture."""
    return not any(name.endswith("Classification") for name in getattr(config, "architectures", None) or [])


def has_reward_model(config: PretrainedConfig) -> bool:
    """Return whether transformers has a reward model class for the architecture of a language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def _find_pad_token_id(config: PretrainedConfig, model: Model) -> int | None:
    """Return the padding token id, which transformers' classifiers need to find the last token of a padded sequence."""
    from transformers import AutoTokenizer

    pad_token = config.get_text_config().pad_token_id
    if pad_token is not None:
        return pad_token
    path = model.tokenizer_path or model.path
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def find_reward_model_class(config: PretrainedConfig, model_path: str) -> str:
    """Return the name of the auto class that loads a reward model. Raises ValueError for models of another kind."""
    names = getattr(config, "architectures", None) or []
    kinds = ("ForSequenceClassification", "ForTokenClassification")  # of tokens, the last one's score is used
    found = [f"AutoModel{kind}" for name in names for kind in kinds if name.endswith(kind)]
    if not found or config.num_labels != 1:
        raise ValueError(
            f"model.path={model_path} is a {' or '.join(names) or config.model_type} with num_labels="
            f"{config.num_labels}, not a reward model with a trained head. Choose a model with num_labels=1 whose "
            "architecture in config.json is <family>ForSequenceClassification, e.g. Qwen3ForSequenceClassification."
        )
    return found[0]


def load_config(model: Model) -> PretrainedConfig:
    """Load the model's config.json. Raises ValueError if model.path is empty or config.json cannot be read."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not model.path:
        raise ValueError("model.path is empty. Set model.path to a Hugging Face hub id or a local folder.")
    folder = Path(model.path)
    if not folder.exists() and is_local_path(model.path):
        raise ValueError(
            f"model.path={model.path} does not exist. Set it to a folder with config.json and weights, or to a hub id."
        )
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"model.path={model.path} has no config.json. Set it to a folder written by save_pretrained.")
    try:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(
            f"model.path={model.path}: cannot read config.json ({_get_first_line(error)}). Check the path, "
            "for a hub id the network and HF_HUB_OFFLINE, and that this version of transformers supports the model."
        ) from error


def _load_model(
    auto_class: str,
    config: PretrainedConfig,
    model: Model,
    attention: Attention,
    dtype: torch.dtype | None,
    new_weights: Collection[str] = (),
) -> PreTrainedModel:
    """Load a model with a transformers auto class. `new_weights`: names of weights that the model folder may lack."""
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # every rank would show a progress bar
    check_layers(config, model.path, attention)
    settings: dict[str, object] = {"dtype": dtype or "auto", "trust_remote_code": model.trust_remote_code}
    # Modeling code in the folder may not support pluggable attention. Padded rows work with any causal attention.
    custom_code = has_custom_code(model, config, auto_class)
    if attention != "padded" or not custom_code:
        settings["attn_implementation"] = name = register_attn_implementation(attention)
        if auto_class == "AutoModelForImageTextToText":
            tower = "flash_attention_2" if attention == "flash" else "sdpa"
            settings["attn_implementation"] = {"text_config": name, "vision_config": tower}
    if dtype == torch.float64:
        settings["experts_implementation"] = "eager"  # grouped matrix products do not support float64
    if dtype is None:
        loaded = _load_pretrained(getattr(transformers, auto_class), config, model.path, settings, new_weights)
    else:
        try:
            with torch.device("meta"):
                loaded = getattr(transformers, auto_class).from_config(config, **settings)
        except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            if custom_code:
                raise
            raise ValueError(  # e.g. a negative size
                f"model.path={model.path}: no model can be built from its config.json ({type(error).__name__}: "
                f"{_get_first_line(error)}). Correct config.json, or choose another model."
            ) from error
    loaded.eval()
    fix_rope_frequencies(loaded, model.max_length)
    if model.use_liger is True:  # resolved, on a GPU
        use_liger_kernels(loaded)
    if model.use_torch_compile:
        for layer in find_decoder_layers(loaded):  # below FSDP's hooks; dynamic, for any number of tokens
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=COMPILER)
    return loaded


def _load_pretrained(
    auto_class: Any, config: PretrainedConfig, path: str, settings: dict[str, object], new_weights: Collection[str]
) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    if new_weights:  # hide transformers' warning that new weights have to be trained
        logging.set_verbosity_error()
    try:
        loaded, info = auto_class.from_pretrained(path, config=config, output_loading_info=True, **settings)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"model.path={path}: its weights cannot be loaded ({_get_first_line(error)}). Check for missing or "
            "truncated weight files."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted({*info["missing_keys"]} - {*new_weights}):
        raise ValueError(
            f"model.path={path}: weights are missing ({len(missing)} in total), e.g. {', '.join(missing[:3])}. Use a "
            "checkpoint that contains all weights of this architecture."
        )
    return loaded


def check_layers(config: PretrainedConfig, model_path: str, attention: Attention) -> None:
    """Raise ValueError if a model has layers that are not supported, or not in packed rows."""
    model, stateful = f"model.path={model_path} ({config.model_type})", describe_stateful_layers(config)
    if found := re.search(r"\w*(chunked|indexed|sparse|compressed|window)\w*", stateful):
        raise ValueError(f"{model} has layers of type {found[0]}, which is not supported. Choose another model.")
    if stateful and attention != "padded":
        raise ValueError(f"{model} {stateful}, so rows cannot be packed. Set model.attention=padded.")


def has_custom_code(model: Model, config: PretrainedConfig, auto_class: str = "AutoModelForCausalLM") -> bool:
    """Return whether a transformers auto class runs Python code from the model's folder to load the model."""
    return model.trust_remote_code and auto_class in (getattr(config, "auto_map", None) or {})


def use_liger_kernels(loaded: PreTrainedModel) -> None:
    """Replace norms, rotary embeddings and gated MLPs by Liger's fused GPU kernels, if the architecture is supported.

    Rotary embeddings are replaced for all models of this architecture in the process.
    """
    from transformers.integrations.liger import apply_liger_kernel

    if loaded.config.model_type in LIGER_ARCHITECTURES:
        apply_liger_kernel(loaded, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def _enable_gradient_checkpointing(loaded: PreTrainedModel, model: Model) -> None:
    """Recompute each decoder layer and each block of a vision tower in the backward pass, if this is configured.

    Transformers' own gradient checkpointing would need layers in training mode, in which some models apply dropout.
    """
    if model.enable_gradient_checkpointing:
        for layer in [*find_decoder_layers(loaded), *find_vision_blocks(loaded)]:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _get_first_line(error: BaseException) -> str:
    return (str(error.__cause__ or error).strip() or type(error).__name__).split("\n")[0]


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
