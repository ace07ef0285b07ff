"""Load Hugging Face models from a local folder or the hub: causal language models and reward models."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Model
from alphaapollo.models.attention.backends import register_backend
from alphaapollo.models.cpu.linear import use_onednn
from alphaapollo.models.decoder import find_decoder_layers
from alphaapollo.utils.hub import is_local_path
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

COMPILER = "inductor"  # torch's own: Triton on a GPU, C++ on a CPU
LIGER_ARCHITECTURES = ("granite", "llama", "qwen2", "qwen3")
"""Architectures for which log-probs and gradients with Liger's kernels were compared with those without."""


def load_causal_lm(model: Model, attention: Attention, dtype: torch.dtype, materialize: bool = True) -> PreTrainedModel:
    """Load a causal language model on the CPU, without dropout.

    Args:
        dtype: of the parameters; float32 for master weights.
        materialize: false = meta tensors, for ranks that receive their shards from rank 0.

    Raises ValueError if the path is missing or unreadable, is not a causal language model, or lacks weights.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = load_config(model)
    if not has_own_code(model, config) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model.path={model.path} is a {config.model_type!r} model, which is not a causal language model. "
            "Give a model that AutoModelForCausalLM loads."
        )
    loaded = _load("AutoModelForCausalLM", config, model, attention, dtype, materialize)
    _enable_gradient_checkpointing(loaded, model)
    return loaded


def load_without_weights(model: Model, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a causal language model with meta tensors, e.g. for its layer names. Raises like load_causal_lm."""
    plain = {"enable_gradient_checkpointing": False, "use_torch_compile": False, "use_liger": False}
    return load_causal_lm(model.model_copy(update=plain), "padded", dtype, materialize=False)


def load_reward_model(
    model: Model, attention: Attention, dtype: torch.dtype, materialize: bool = True
) -> PreTrainedModel:
    """Load a trained reward model: a decoder with a linear head `score`, as transformers saves it.

    Arguments and errors like load_causal_lm. Also raises ValueError for a model without a trained head of one score.
    """
    config = load_config(model)
    loaded = _load(find_reward_model_class(config, model.path), config, model, attention, dtype, materialize)
    if not isinstance(getattr(loaded, "score", None), torch.nn.Linear):
        raise ValueError(
            f"model.path={model.path}: {type(loaded).__name__} has no linear head named `score` on a decoder. Give a "
            "reward model that is built on a causal language model."
        )
    return loaded


def load_or_init_reward_model(
    model: Model, attention: Attention, dtype: torch.dtype, materialize: bool, seed: int
) -> PreTrainedModel:
    """Load a reward model for training: a trained one, or a causal language model with a new head `score`, drawn by
    `seed`. Other arguments and errors like load_reward_model."""
    config = load_config(model)
    if not is_causal_lm(config):
        loaded = load_reward_model(model, attention, dtype, materialize)
    else:
        check_reward_model_family(config, model.path)
        config.num_labels = 1
        config.pad_token_id = _find_pad_token(config, model)
        auto = "AutoModelForSequenceClassification"
        loaded = _load(auto, config, model, attention, dtype, materialize, new_weights={"score.weight"})
        if materialize:
            draw_head(cast("torch.nn.Linear", loaded.score), seed, "score_head")
    _enable_gradient_checkpointing(loaded, model)
    return loaded


def draw_head(head: torch.nn.Linear, seed: int, name: str) -> None:
    """Draw the weights of a new head from N(0, 1 / (H + 1)^2), so that its first outputs are near zero."""
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    head.weight.data.copy_(torch.randn(1, head.in_features, generator=generator) / (head.in_features + 1))


def is_causal_lm(config: PretrainedConfig) -> bool:
    """Whether config.json does not name a classifier."""
    return not any(name.endswith("Classification") for name in getattr(config, "architectures", None) or [])


def check_reward_model_family(config: PretrainedConfig, path: str) -> None:
    """Raise ValueError if transformers cannot make a reward model of this language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"model.path={path} is a {config.model_type!r} model, for which transformers has no reward model. Give a "
            "model of another family, e.g. Qwen3 or Llama."
        )


def _find_pad_token(config: PretrainedConfig, model: Model) -> int | None:
    """Padding token, which transformers' own forward pass uses to find the last token of a row."""
    from transformers import AutoTokenizer

    known = config.get_text_config().pad_token_id
    if known is not None:
        return known
    path = model.tokenizer_path or model.path
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def find_reward_model_class(config: PretrainedConfig, path: str) -> str:
    """Auto class of a reward model, from config.json. Raises ValueError for other models."""
    names = getattr(config, "architectures", None) or []
    kinds = ("ForSequenceClassification", "ForTokenClassification")  # of the scores of all tokens the last is used
    found = [f"AutoModel{kind}" for name in names for kind in kinds if name.endswith(kind)]
    if not found or config.num_labels != 1:
        raise ValueError(
            f"model.path={path} is a {' or '.join(names) or config.model_type} with num_labels={config.num_labels}, "
            "not a reward model with a trained head of one score. Give a ...ForSequenceClassification model."
        )
    return found[0]


def load_config(model: Model) -> PretrainedConfig:
    """Load the model's configuration. Raises ValueError if the path is missing or unreadable."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not model.path:
        raise ValueError("no model path is given. Set model.path to a Hugging Face hub id or a local folder.")
    folder = Path(model.path)
    if not folder.exists() and is_local_path(model.path):
        raise ValueError(
            f"model.path={model.path} does not exist. Give a folder with config.json and weights, or a hub id."
        )
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"model.path={model.path} has no config.json. Give a folder written by save_pretrained.")
    try:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"model.path={model.path}: cannot read config.json: {_get_first_line(error)}") from error


def _load(
    auto: str,
    config: PretrainedConfig,
    model: Model,
    attention: Attention,
    dtype: torch.dtype,
    materialize: bool,
    new_weights: Collection[str] = (),
) -> PreTrainedModel:
    """Load with transformers' class `auto`. new_weights: weights that need not be in the folder."""
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # every rank would show one
    if "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or []):
        raise ValueError(
            f"model.path={model.path}: layers with chunked attention are not supported. Choose another model."
        )
    settings: dict[str, Any] = {"dtype": dtype, "trust_remote_code": model.trust_remote_code}
    # Modeling code of the folder may not support pluggable attention. Padded rows work with any causal attention.
    own_code = has_own_code(model, config, auto)
    if attention != "padded" or not own_code:
        settings["attn_implementation"] = register_backend(attention)
    if dtype == torch.float64:
        settings["experts_implementation"] = "eager"  # grouped matrix products do not support float64
    if materialize:
        loaded = _load_weights(getattr(transformers, auto), config, model.path, settings, new_weights)
    else:
        try:
            with torch.device("meta"):
                loaded = getattr(transformers, auto).from_config(config, **settings)
        except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            if own_code:
                raise
            raise ValueError(  # e.g. a negative size
                f"model.path={model.path}: no model can be built from its config.json: {type(error).__name__}: "
                f"{_get_first_line(error)}"
            ) from error
    loaded.eval()
    use_onednn(loaded)
    if model.use_liger is True:  # resolved, on a GPU
        apply_liger(loaded)
    if model.use_torch_compile:
        for layer in find_decoder_layers(loaded):  # below FSDP's hooks; for any number of tokens
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=COMPILER)
    return loaded


def _load_weights(
    auto_class: Any, config: PretrainedConfig, path: str, settings: dict[str, Any], new_weights: Collection[str]
) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    if new_weights:  # transformers would warn that they have to be trained
        logging.set_verbosity_error()
    try:
        loaded, info = auto_class.from_pretrained(path, config=config, output_loading_info=True, **settings)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"model.path={path}: its weights cannot be loaded: {_get_first_line(error)} Check for missing or truncated "
            "weight files."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted({*info["missing_keys"]} - {*new_weights}):
        raise ValueError(
            f"model.path={path} lacks {len(missing)} of the model's weights, e.g. {', '.join(missing[:3])}, which "
            "would be random. Give a complete checkpoint of this architecture."
        )
    return loaded


def has_own_code(model: Model, config: PretrainedConfig, auto: str = "AutoModelForCausalLM") -> bool:
    """Whether transformers' class `auto` runs modeling code of the model's folder."""
    return model.trust_remote_code and auto in (getattr(config, "auto_map", None) or {})


def apply_liger(loaded: PreTrainedModel) -> None:
    """Replace norms, rotary embeddings and gated MLPs by Liger's fused GPU kernels, if the architecture is supported.

    Rotary embeddings are replaced in the architecture's module, for all its models in the process.
    """
    from transformers.integrations.liger import apply_liger_kernel

    if loaded.config.model_type in LIGER_ARCHITECTURES:
        apply_liger_kernel(loaded, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def _enable_gradient_checkpointing(loaded: PreTrainedModel, model: Model) -> None:
    """Enable it, if configured, and set `training` on the layers, which transformers requires; dropout depends on the
    flag of inner modules, which stay in evaluation mode."""
    if not model.enable_gradient_checkpointing:
        return
    if not loaded.supports_gradient_checkpointing:
        raise ValueError(
            f"model.path={model.path}: {type(loaded).__name__} does not support gradient checkpointing. "
            "Set model.enable_gradient_checkpointing=False."
        )
    loaded.gradient_checkpointing_enable({"use_reentrant": False})
    for module in loaded.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _get_first_line(error: BaseException) -> str:
    return (str(error.__cause__ or error).strip() or type(error).__name__).split("\n")[0]
