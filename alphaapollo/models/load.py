"""Loading of causal language models and reward models, from a local folder or the Hugging Face hub."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Model
from alphaapollo.data.images import find_placeholder_ids, reads_images
from alphaapollo.data.rendering import Renderer, make_template_digest
from alphaapollo.models.attention import find_unsupported_features, register_attn_implementation
from alphaapollo.models.decoder import describe_stateful_layers, find_decoder_layers, load_example_image
from alphaapollo.models.file_tensors import leaves_experts, mark_file_tensors, read_state_dict_without_experts
from alphaapollo.models.quantized import (
    quantize_layers,
    read_group_size,
    read_quantization,
    read_state_dict,
    remove_quantization,
)
from alphaapollo.models.recompute import recompute_layers
from alphaapollo.models.vision_attention import use_varlen_attention_in_vision_tower
from alphaapollo.models.weight_files import check_tensor_names, find_head, find_weight_files
from alphaapollo.utils.hub import check_model_files, is_local_path
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


COMPILER = "inductor"  # torch's own: Triton on a GPU, C++ on a CPU
WEIGHT_FILES_FIX = "for missing or truncated weight files, and that config.json fits them"  # after "Check"
LIGER_ARCHITECTURES = ("granite", "llama", "qwen2", "qwen3")
"""Architectures for which log-probs and gradients were compared with and without Liger's kernels."""


def load_causal_lm(model: Model, attention: Attention, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a causal language model, or a vision-language model, without dropout, on the CPU. dtype: build
    parameters of this dtype on the meta device, without weights; None: load the weights in the dtypes of their files.
    Raises ValueError if the model cannot be read, is not a causal language model, or lacks weights."""
    config = load_config(model)
    auto_class = _find_causal_class(config, model)
    loaded = _load_model(auto_class, config, model, attention, dtype)
    recompute_layers(loaded, model)
    return loaded


def _find_causal_class(config: PretrainedConfig, model: Model) -> str:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    uses_custom_code = has_custom_code(model, config)
    if not uses_custom_code and reads_images(config):
        return "AutoModelForImageTextToText"
    if not uses_custom_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model.path={model.path} is a {config.model_type!r} model, which is not a causal language model. "
            "Choose a model that AutoModelForCausalLM loads."
        )
    return "AutoModelForCausalLM"


def check_weight_files(model: Model) -> list[str]:
    """Compare a model with the headers of its weight files. Return the names of tensors outside the decoder layers that
    no module takes. Raises ValueError if the files do not fit config.json."""
    import transformers
    from transformers.utils import logging

    config = load_config(model)
    if find_quantization(config) or not find_weight_files(model.path):
        return []
    is_policy = is_causal_lm(config)
    name = _find_causal_class(config, model) if is_policy else find_reward_model_class(config, model.path)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would print a table of the names
    logging.disable_progress_bar()
    settings = {"device_map": "meta", "output_loading_info": True, "trust_remote_code": model.trust_remote_code}
    try:
        with _explain_errors(model, "the model", WEIGHT_FILES_FIX):
            _, info = getattr(transformers, name).from_pretrained(model.path, config=config, **settings)
            check_tensor_names(config, info["unexpected_keys"], info["missing_keys"])
    finally:
        logging.set_verbosity(verbosity)
    return sorted(info["unexpected_keys"])


def load_without_weights(model: Model, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a causal language model on the meta device, without weights, as if they were not quantized. Raises the
    errors of load_causal_lm."""
    config, changes = load_config(model), {"use_torch_compile": False, "use_liger": False}
    auto_class = _find_causal_class(config, model)
    remove_quantization(config)
    return _load_model(auto_class, config, model.model_copy(update=changes), "padded", dtype)


def load_reward_model(
    model: Model, attention: Attention, dtype: torch.dtype | None = None, head_seed: int | None = None
) -> PreTrainedModel:
    """Load a trained reward model: a decoder with a linear head `score`, as transformers saves it. dtype: see
    load_causal_lm. head_seed: load for training, and if the model is a causal language model, give it a new head with
    this seed. Raises the errors of load_causal_lm."""
    config = load_config(model)
    if head_seed is not None and is_causal_lm(config):
        config.num_labels, config.pad_token_id = 1, _find_pad_token_id(config, model)
        loaded = _load_model("AutoModelForSequenceClassification", config, model, attention, dtype, {"score.weight"})
        if dtype is None:
            init_scalar_head(cast("torch.nn.Linear", loaded.score.float()), derive_seed(head_seed, "score_head"))
    else:
        loaded = _load_model(find_reward_model_class(config, model.path), config, model, attention, dtype)
    if not isinstance(getattr(loaded, "score", None), torch.nn.Linear):
        raise ValueError(
            f"model.path={model.path}: {type(loaded).__name__} has no linear head named `score` on a decoder. Choose a "
            "reward model that is built on a causal language model."
        )
    if head_seed is not None:
        recompute_layers(loaded, model)
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
    endings = ("ForSequenceClassification", "ForTokenClassification")  # a token classifier's score is its last one
    classes = [f"AutoModel{ending}" for name in names for ending in endings if name.endswith(ending)]
    if not classes or config.num_labels != 1:
        raise ValueError(
            f"model.path={model_path} is a {' or '.join(names) or config.model_type} with num_labels="
            f"{config.num_labels}, not a reward model with a trained head. Choose a model with num_labels=1 whose "
            "architecture in config.json is <family>ForSequenceClassification, e.g. Qwen3ForSequenceClassification."
        )
    return classes[0]


def load_config(model: Model) -> PretrainedConfig:
    """Load the model's config.json. As in transformers and vLLM, an output head that differs from the embedding in the
    weight files is not tied. Raises ValueError if model.path is empty or config.json cannot be read."""
    config = read_config(model)
    if find_tied_head(config, model.path) == "own":
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    return config


def find_tied_head(config: PretrainedConfig, path: str) -> str:
    """Return what the files have as output head (find_head) if config.json ties it to the embedding, else ""."""
    parts = (config, config.get_text_config())
    return find_head(path) if any(getattr(part, "tie_word_embeddings", False) for part in parts) else ""


def read_config(model: Model) -> PretrainedConfig:
    """Read config.json as it is. Raises the errors of load_config."""
    from transformers import AutoConfig

    if not model.path or (is_local_path(model.path) and not (Path(model.path) / "config.json").is_file()):
        raise ValueError(
            f"model.path={model.path or 'empty'}: no such folder with a config.json. Set it to a folder written by "
            "save_pretrained, or to a hub id."
        )
    fix = (
        "the path, for a hub id the network and HF_HUB_OFFLINE, and that transformers supports the model. If you trust "
        "code that comes with it, set trust_remote_code=true beside its path"
    )
    with _explain_errors(model, "config.json", fix):
        if Path(model.path).is_dir():
            check_model_files(model.path)
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)


@contextmanager
def _explain_errors(model: Model, file: str, fix: str) -> Iterator[None]:
    """Context manager that converts errors of transformers to a ValueError with the model's path."""
    try:
        yield
    except Exception as error:  # errors of transformers, safetensors, the hub and a model's own code
        reason = (str(error.__cause__ or error).strip() or type(error).__name__).split("\n")[0]
        raise ValueError(f"model.path={model.path}: cannot read {file} ({reason}). Check {fix}.") from error


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
    if attention != "padded" or not has_custom_code(model, config, auto_class):
        settings["attn_implementation"] = name = register_attn_implementation(attention)
        if auto_class == "AutoModelForImageTextToText":
            settings["attn_implementation"] = {"text_config": name, "vision_config": "sdpa"}
    if dtype == torch.float64:
        settings["experts_implementation"] = "eager"  # grouped matrix products do not support float64
    model_class: Any = getattr(transformers, auto_class)
    if group_size := read_group_size(config, model.path):
        remove_quantization(config)  # of the files, but not of the built model, which may be exported
    with _explain_errors(model, "the model", WEIGHT_FILES_FIX):
        if dtype is not None or group_size or leaves_experts(config):
            meta_dtype = dtype or (torch.float32 if group_size else config.dtype)
            with torch.device("meta"):
                loaded = model_class.from_config(config, **settings | {"dtype": meta_dtype})
        if dtype is None:
            tensors: dict[str, torch.Tensor] = {}
            if group_size:
                settings["dtype"] = files_dtype = config.dtype or torch.bfloat16
                tensors = read_state_dict(model.path, files_dtype)
            elif leaves_experts(config):
                tensors = read_state_dict_without_experts(loaded, model.path)
            if tensors:
                settings["state_dict"], model_class = tensors, type(loaded)
            path = None if tensors else model.path
            loaded, info = model_class.from_pretrained(path, config=config, output_loading_info=True, **settings)
            check_tensor_names(config, info["unexpected_keys"], {*info["missing_keys"]} - {*new_weights})
            mark_file_tensors(loaded, model.path, new_weights)
        if group_size:
            quantize_layers(loaded, model.path, group_size)
    loaded.eval()
    if attention in ("varlen", "flash"):
        use_varlen_attention_in_vision_tower(loaded)
    fix_rope_frequencies(loaded, model.max_length)
    if model.use_liger is True:  # resolve_model replaces auto
        use_liger_kernels(loaded, rotates=not model.keeps_products)
    if model.use_torch_compile:
        for layer in find_decoder_layers(loaded):  # before FSDP adds hooks, which are not compiled
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=COMPILER)
    return cast("PreTrainedModel", loaded)


def check_layers(config: PretrainedConfig, model_path: str, attention: Attention) -> None:
    """Raise ValueError if a model has layers that are not supported, or not in packed rows."""
    model, stateful = f"model.path={model_path} ({config.model_type})", describe_stateful_layers(config)
    if kind := re.search(r"\w*(chunked|indexed|sparse|compressed|window)\w*", stateful):
        raise ValueError(f"{model} has layers of type {kind[0]}, which is not supported. Choose another model.")
    if stateful and attention != "padded":
        raise ValueError(f"{model} {stateful}, so rows cannot be packed. Set model.attention=padded.")
    if missing := " and ".join(find_unsupported_features(config.get_text_config(), attention)):
        fix = f"which model.attention={attention} does not support. Set model.attention=sdpa"
        raise ValueError(f"{model} needs attention with {missing}, {fix}.")


def has_custom_code(model: Model, config: PretrainedConfig, auto_class: str = "AutoModelForCausalLM") -> bool:
    """Return whether a transformers auto class runs Python code from the model's folder to load the model."""
    return model.trust_remote_code and auto_class in (getattr(config, "auto_map", None) or {})


def use_liger_kernels(loaded: PreTrainedModel, rotates: bool = True) -> None:
    """Replace norms, rotary embeddings and gated MLPs by Liger's fused GPU kernels, if the architecture is supported.
    Rotary embeddings, which overwrite their inputs, are replaced for all models of this architecture in the process.
    rotates: replace them."""
    # On Hopper, Liger would take another kernel for large batches with gradients than for log-probs.
    os.environ.setdefault("LIGER_KERNEL_IMPL_ROPE", "nvidia-triton")
    from transformers.integrations.liger import apply_liger_kernel

    if loaded.config.model_type in LIGER_ARCHITECTURES:
        apply_liger_kernel(loaded, {"rope": rotates, "cross_entropy": False, "fused_linear_cross_entropy": False})


def fix_rope_frequencies(model: PreTrainedModel, max_length: int) -> None:
    """Choose the frequencies of dynamic and longrope position embeddings once per run, as vLLM does.

    Transformers chooses them in each forward pass by the longest row, so that a row's log-probs would depend on the
    other rows of the micro-batch. `max_length`: tokens of the longest row of the run. Raises ValueError if dynamic
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
    """Return RoPE parameters, which may be nested by layer type, with the same factors for sequences of any length:
    longrope's long factors if `max_length` exceeds the original context, and no dynamic scaling."""
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


def find_quantization(config: PretrainedConfig) -> str:
    """Return the method with which weights are quantized, e.g. "gptq"; empty if they are not."""
    return str(read_quantization(config).get("quant_method", ""))


def describe_image_input(model: Model) -> tuple[object, ...] | None:
    """Return placeholder tokens and the prepared form of a generated image. None if the model reads no images."""
    if (image := load_example_image(model)) is None:
        return None
    return find_placeholder_ids(load_config(model)), image.digest, tuple(image.token_ids)


def check_vocabulary_size(model: Model, tokenizer: PreTrainedTokenizerBase, path_key: str) -> None:
    """Raise ValueError if the model lacks an embedding for a token of the tokenizer that is not special, or for the end
    or padding token. Other special tokens are ignored."""
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
    """Return notices about template arguments without effect, another template than in training, and control strings in
    the prompts rendered so far."""
    tokenizer = renderer.tokenizer
    unread = (name for name in template_arguments if tokenizer.chat_template and not renderer.template_reads(name))
    no_effect = "has no effect: the tokenizer's chat template does not read it."
    notices = [f"data.apply_chat_template_kwargs.{name} {no_effect}" for name in unread]
    notices += [*renderer.list_control_notices(), *renderer.list_end_notices()]
    trained_digest = getattr(load_config(model), "chat_template_digest", None)
    if tokenizer.chat_template and trained_digest not in (None, make_template_digest(tokenizer)):
        other = f"that of {model.tokenizer_path}" if model.tokenizer_path else "its folder has now"
        notices.append(
            f"{model.path} was trained with another chat template than {other}, which usually makes its answers much "
            "worse. Use the tokenizer of its training."
        )
    return notices
