"""Hugging Face models from a local folder or the hub: causal language models, and classifiers with one score.

Errors say what to do.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Model
from alphaapollo.models.attention.backends import register
from alphaapollo.models.cpu.linear import accelerate
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.liger import fuse
from alphaapollo.utils.hub import looks_local
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

COMPILER = "inductor"  # torch's own: Triton on a GPU, C++ on a CPU


def load_causal_lm(model: Model, attention: Attention, dtype: torch.dtype, materialize: bool = True) -> PreTrainedModel:
    """The model on the CPU, without dropout, ready for gradient checkpointing where asked for.

    Args:
        dtype: of the parameters: float32 for master weights.
        materialize: false: shapes only (meta tensors), for the ranks that receive their shards from rank 0.

    Raises ValueError for a path that is missing, unreadable, not a causal language model, or lacks weights.
    """
    config = load_config(model)
    _check_is_causal_lm(model, config)
    loaded = _load("AutoModelForCausalLM", model, config, attention, dtype, materialize)
    if model.enable_gradient_checkpointing:
        _checkpoint_activations(loaded, model.path)
    return loaded


def load_without_weights(model: Model) -> PreTrainedModel:
    """The model without weights (meta tensors), for what its layers are called. Raises ValueError as load_causal_lm."""
    config = load_config(model)
    _check_is_causal_lm(model, config)
    return _load("AutoModelForCausalLM", model, config, "padded", torch.float32, materialize=False)


def load_reward_model(
    model: Model, attention: Attention, dtype: torch.dtype, materialize: bool = True
) -> PreTrainedModel:
    """A decoder whose `score` turns each hidden state into one number: a reward model as transformers saves it.

    Arguments as of load_causal_lm. Raises ValueError as there, and for a model without a trained head of one score.
    """
    config = load_config(model)
    loaded = _load(reward_model_class(config, model.path), model, config, attention, dtype, materialize)
    head = getattr(loaded, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(
            f"model.path={model.path}: {type(loaded).__name__} has no linear head named `score` on a decoder. Give a "
            "reward model that is built on a causal language model."
        )
    return loaded


def load_or_init_reward_model(
    model: Model, attention: Attention, dtype: torch.dtype, materialize: bool, seed: int
) -> PreTrainedModel:
    """A reward model to be trained: one to go on with, or a causal language model with a fresh `score`, drawn by `seed`
    from N(0, 1 / (H + 1)^2) so that first scores are near zero.

    Arguments as of load_causal_lm. Raises ValueError as there, and for a model of any other kind.
    """
    config = load_config(model)
    if not (fresh := is_causal_lm(config)):
        loaded = load_reward_model(model, attention, dtype, materialize)
    else:
        check_reward_model_family(config, model.path)
        config.num_labels = 1
        config.pad_token_id = _pad_token(config, model)
        auto = "AutoModelForSequenceClassification"
        loaded = _load(auto, model, config, attention, dtype, materialize, {"score.weight"})
    if fresh and materialize:
        size = config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(derive_seed(seed, "score_head"))
        weight = torch.randn(1, size, generator=generator) / (size + 1)
        cast("torch.nn.Linear", loaded.score).weight.data.copy_(weight)
    if model.enable_gradient_checkpointing:
        _checkpoint_activations(loaded, model.path)
    return loaded


def is_causal_lm(config: PretrainedConfig) -> bool:
    """By what config.json says alone: it was not saved as a classifier."""
    return not any(name.endswith("Classification") for name in getattr(config, "architectures", None) or [])


def check_reward_model_family(config: PretrainedConfig, path: str) -> None:
    """Can a reward model be made of this language model? Raises ValueError."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"model.path={path} is a {config.model_type!r} model, of which transformers makes no reward model (no "
            "...ForSequenceClassification on a causal language model). Give a model of another family, e.g. Qwen3 or "
            "Llama."
        )


def _pad_token(config: PretrainedConfig, model: Model) -> int | None:
    """Transformers' own forward pass finds a row's last token by it."""
    from transformers import AutoTokenizer

    known = config.get_text_config().pad_token_id
    if known is not None:
        return known
    path = model.tokenizer_path or model.path
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def reward_model_class(config: PretrainedConfig, path: str) -> str:
    """The auto class of a reward model, by what config.json says alone. Raises ValueError for any other model."""
    classes = {"ForSequenceClassification": "AutoModelForSequenceClassification"}
    classes["ForTokenClassification"] = "AutoModelForTokenClassification"  # a score at every token: the last is read
    names = getattr(config, "architectures", None) or []
    found = [auto for name in names for end, auto in classes.items() if name.endswith(end)]
    if not found:
        raise ValueError(
            f"model.path={path} is a {' or '.join(names) or config.model_type}, not a reward model that can be loaded: "
            "a fresh score head would give noise. Give one saved as ...ForSequenceClassification with num_labels=1."
        )
    if config.num_labels != 1:
        raise ValueError(
            f"model.path={path} has num_labels={config.num_labels}: a classifier of that many classes. A reward model "
            "has one score: num_labels=1."
        )
    return found[0]


def load_config(model: Model) -> PretrainedConfig:
    """The model's configuration. Raises ValueError for a path that is missing or unreadable."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not model.path:
        raise ValueError("no model path is given. Set model.path to a Hugging Face hub id or a local folder.")
    folder = Path(model.path)
    if not folder.exists() and looks_local(model.path):
        raise ValueError(
            f"model.path={model.path} does not exist. Give a folder with config.json and weights, or a hub id."
        )
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(
            f"model.path={model.path} holds no config.json. Give a folder that save_pretrained has written."
        )
    try:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"model.path={model.path}: its configuration cannot be read: {_first_line(error)}") from error


def _load(
    auto: str,
    model: Model,
    config: PretrainedConfig,
    attention: Attention,
    dtype: torch.dtype,
    materialize: bool,
    fresh: Collection[str] = (),
) -> PreTrainedModel:
    """The model that transformers' class `auto` makes of the folder. fresh: weights that it need not have."""
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # every rank would draw its own
    _check_layers(config, model.path)
    auto_class = getattr(transformers, auto)
    settings = {
        "dtype": dtype,
        "trust_remote_code": model.trust_remote_code,
        **_attention(auto, model, config, attention),
    }
    if dtype == torch.float64:
        settings["experts_implementation"] = "eager"  # the grouped products have no float64
    if materialize:
        loaded = _load_weights(auto_class, model, config, settings, fresh)
    else:
        loaded = _without_weights(auto_class, model, config, settings)
    loaded.eval()
    accelerate(loaded)
    if model.use_liger is True:  # resolved, on a GPU
        fuse(loaded)
    if model.use_torch_compile:
        _compile_layers(loaded)
    return loaded


def _compile_layers(loaded: PreTrainedModel) -> None:
    """Below FSDP's hooks, which stay as they are; for any number of tokens."""
    for layer in decoder_layers(loaded):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=COMPILER)


def _load_weights(
    auto_class: Any, model: Model, config: PretrainedConfig, settings: dict[str, Any], fresh: Collection[str]
) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers.utils import logging

    told = logging.get_verbosity()
    if fresh:  # transformers would advise to train what is about to be trained
        logging.set_verbosity_error()
    try:
        loaded, info = auto_class.from_pretrained(model.path, config=config, output_loading_info=True, **settings)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"model.path={model.path}: its weights cannot be loaded: {_first_line(error)} "
            "Look for missing or cut-off weight files."
        ) from error
    finally:
        logging.set_verbosity(told)
    missing = sorted({*info["missing_keys"]} - {*fresh})
    if missing:
        raise ValueError(
            f"model.path={model.path} lacks {len(missing)} of the model's weights, e.g. {', '.join(missing[:3])}; they "
            "would be random. Give a complete checkpoint of this architecture."
        )
    return loaded


def _without_weights(
    auto_class: Any, model: Model, config: PretrainedConfig, settings: dict[str, Any]
) -> PreTrainedModel:
    """Shapes alone. What config.json says may fit no model: layers of a negative size, heads that do not divide."""
    try:
        with torch.device("meta"):
            return auto_class.from_config(config, **settings)
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        if has_own_code(model, config, auto_class.__name__):
            raise
        raise ValueError(
            f"model.path={model.path}: no model can be made of its config.json: {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error


def has_own_code(model: Model, config: PretrainedConfig, auto: str = "AutoModelForCausalLM") -> bool:
    """Does transformers' class `auto` run Python code of the model's folder? Without leave it has a class of its own
    for the model, or refuses it."""
    return model.trust_remote_code and auto in (getattr(config, "auto_map", None) or {})


def _attention(auto: str, model: Model, config: PretrainedConfig, attention: Attention) -> dict[str, Any]:
    """How to ask for the attention. Code from the model's own folder may not know pluggable attention: padded rows
    then run through whatever attention it has, for they need no mask."""
    if has_own_code(model, config, auto) and attention == "padded":
        return {}
    return {"attn_implementation": register(attention)}


def _check_is_causal_lm(model: Model, config: PretrainedConfig) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if not has_own_code(model, config) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model.path={model.path} is a {config.model_type!r} model, which is not a causal language model. "
            "Give a model that AutoModelForCausalLM loads."
        )


def _check_layers(config: PretrainedConfig, path: str) -> None:
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or [])
    if "chunked_attention" in kinds:
        raise ValueError(f"model.path={path}: layers with chunked attention are not supported. Choose another model.")


def _checkpoint_activations(loaded: PreTrainedModel, path: str) -> None:
    """Transformers checkpoints a layer only while it is `training`; dropout looks at the flag of inner modules, which
    stay in evaluation mode."""
    if not loaded.supports_gradient_checkpointing:
        raise ValueError(
            f"model.path={path}: {type(loaded).__name__} does not support gradient checkpointing. "
            "Set model.enable_gradient_checkpointing=False."
        )
    loaded.gradient_checkpointing_enable({"use_reentrant": False})
    for module in loaded.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _first_line(error: BaseException) -> str:
    return (str(error.__cause__ or error).strip() or type(error).__name__).split("\n")[0]
