"""What models do not support: one table for all commands that train or serve a model.

A command describes how it uses its models (ModelUse). `check_models` applies the rows of MODELS: the functions below,
which return a true value if the model lacks support. The value fills {} in the texts of the row, and a tuple fills {0},
{1}, ... (config/requirements.py). The column of vLLM in docs/models.md is generated from the same rows.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from alphaapollo.config.requirements import CheckContext, Requirement, find_conflicts, list_divisors, requirement
from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import Fsdp, Model, Rollout
from alphaapollo.config.schema.data import PromptData
from alphaapollo.data.images import reads_images
from alphaapollo.engines.factory import load_engine_class
from alphaapollo.engines.protocol import DISTRIBUTION_CHANGING_ARGUMENTS
from alphaapollo.models.decoder import describe_stateful_layers
from alphaapollo.models.expert_parallel import find_experts
from alphaapollo.models.load import (
    LIGER_ARCHITECTURES,
    check_layers,
    check_weight_files,
    describe_image_input,
    find_quantization,
    find_reward_model_class,
    find_tied_head,
    has_reward_model,
    is_causal_lm,
    load_config,
    load_without_weights,
    read_config,
)
from alphaapollo.models.lora import resolve_target_modules
from alphaapollo.models.moe_routing import ExpertSizes, RouterHooks
from alphaapollo.models.quantized import find_unsupported_quantization


@dataclass(frozen=True)
class ModelUse:
    """Model of a command, and the settings that the model must support."""

    key: str  # config key of the model's path, e.g. model.path
    model: Model
    writes_text: bool = True  # False: a critic, a reward model or a teacher
    engine: Rollout | None = None  # settings of the engine that serves the model
    engine_section: str = "rollout"
    lengths: PromptData | None = None  # limits of the sequences of the engine
    fsdp: Fsdp | None = None  # sharding of a model that is trained
    fsdp_section: str = "fsdp_config"
    num_ranks: int = 1
    ulysses_size: int = 1  # ranks that share every sequence
    ulysses_section: str = ""  # e.g. actor_rollout_ref.actor.
    policy: Model | None = None  # policy whose prepared images the model reads
    trains_scores: bool = False  # True: the model becomes a reward model (main_rm)
    optimizer: str = ""  # name of a policy's optimizer
    self_teacher_length: int = 0  # maximum tokens that the policy reads as its own teacher

    def __str__(self) -> str:
        return f"{self.key}={self.model.path} ({self.config.model_type})"

    @cached_property
    def config(self) -> Any:
        """The model's configuration of transformers."""
        return load_config(self.model)


MODELS: list[Requirement] = []
model_requirement = partial(requirement, ModelUse, table=MODELS)


def check_models(uses: Iterable[ModelUse]) -> list[str]:
    """Return notices. Raises ValueError if a model does not support its settings, or an engine its arguments."""
    notices = list[str]()
    for use in uses:
        if message := next(find_unsupported_features(use), ""):
            raise ValueError(message)
        if unused := check_weight_files(use.model):
            tensors = f"{len(unused)} tensors in the files of the model, e.g. {unused[0]}"
            notices.append(f"{use}: no module takes {tensors}; they are ignored.")
    return [*dict.fromkeys(notices)]


def find_unsupported_features(use: ModelUse) -> Iterator[str]:
    """Yield an error message for each row of MODELS, and of the engine's table, that a model does not meet."""
    rows = load_engine_class(use.engine.name).list_requirements() if use.engine else []
    return find_conflicts(CheckContext(use), table=[*rows, *MODELS])


@model_requirement(
    "weights", "{use} has quantized weights ({}), for vLLM only", "Use the original model, or read docs/lora.md"
)
def weights_are_quantized(use: ModelUse, context: CheckContext) -> object:
    if use.engine is not None and not load_engine_class(use.engine.name).reads_quantized:
        return find_quantization(use.config)
    is_only_served = use.engine is not None and not use.fsdp
    return not is_only_served and find_unsupported_quantization(use.config)


@model_requirement("{0}lora_rank=0", "{use} has weights of 4 bits, which cannot be trained", "Set {0}lora_rank")
def quantized_weights_are_frozen(use: ModelUse, context: CheckContext) -> object:
    is_trained = use.fsdp and not use.model.lora_rank
    return is_trained and find_quantization(use.config) and (use.key.removesuffix("path"),)


@model_requirement(
    "{use.engine_section}.lora=merged",
    "{use} has weights of 4 bits, to which the engine cannot add adapters",
    "Set {use.engine_section}.lora=adapter",
)
def quantized_weights_are_not_sent(use: ModelUse, context: CheckContext) -> object:
    return use.fsdp and use.engine and use.engine.lora == "merged" and find_quantization(use.config)


@model_requirement("{use.engine_section}.engine_kwargs.{0}", "{1}", "Remove it")
def engine_argument_is_unusable(use: ModelUse, context: CheckContext) -> object:
    if use.engine is None or not use.engine.has_engine_process:
        return None
    name, engine = use.engine.name, load_engine_class(use.engine.name)
    given = getattr(use.engine.engine_kwargs, name)
    files = Path(sys.prefix).glob(engine.argument_files) if given else ()  # to import them takes seconds
    known = {field for file in files for field in re.findall(r"^    (\w+): ", file.read_text(), re.MULTILINE)}
    for key in given:
        if key in engine.reserved_arguments:
            return f"{name}.{key}", "other keys set it"
        if any(fnmatch(key, pattern) for pattern in DISTRIBUTION_CHANGING_ARGUMENTS):
            return f"{name}.{key}", "with it, tokens are sampled from another distribution than the model's"
        if known and key not in known:
            return f"{name}.{key}", f"{name} has no such argument"
    return None


@model_requirement("text generation", "{use} is a {}, not a causal language model", "Use the model before it")
def model_writes_no_text(use: ModelUse, context: CheckContext) -> object:
    return use.writes_text and not is_causal_lm(use.config) and use.config.architectures[0]


@model_requirement("main_rm", "{use} has no reward model in transformers", "Choose another family, e.g. Qwen3 or Llama")
def reward_model_is_missing(use: ModelUse, context: CheckContext) -> object:
    if use.trains_scores and not is_causal_lm(use.config):
        find_reward_model_class(use.config, use.model.path)  # raises for other classifiers
        return None
    return use.trains_scores and not has_reward_model(use.config)


@model_requirement("images", "{use} reads other images or placeholder tokens than {}", "Use the policy's family")
def images_differ_from_the_policys(use: ModelUse, context: CheckContext) -> object:
    policy = use.policy or use.model
    is_same = policy.path == use.model.path or describe_image_input(use.model) == describe_image_input(policy)
    return not is_same and policy.path


@model_requirement(
    "{use.engine_section}.name={}", "{use} is a vision-language model", "Set {use.engine_section}.name=vllm"
)
def engine_reads_no_images(use: ModelUse, context: CheckContext) -> object:
    name = use.engine.name if use.engine and reads_images(use.config) else ""
    return name and not load_engine_class(name).reads_images and name


@model_requirement(
    "{use.engine_section}.name={use.engine.name} with {use.engine_section}.top_p, top_k or min_p",
    "this engine does not return the tokens that its sampler kept, which the trainer's log-probs need",
    "Use vllm or hf, or set {use.engine_section}.sampling_mask=False, which biases the gradients",
)
def engine_returns_no_kept_tokens(use: ModelUse, context: CheckContext) -> object:
    engine = use.engine if use.fsdp else None  # only a trained model needs them
    return engine and engine.returns_kept_tokens and not load_engine_class(engine.name).returns_kept_tokens


@model_requirement(
    "{use.engine_section}.name={use.engine.name}",
    "{use} has an output head and no embedding in its files, which this engine does not load",
    "Save the model again with transformers, or set {use.engine_section}.name=hf",
)
def engine_needs_an_embedding(use: ModelUse, context: CheckContext) -> object:
    has_process = use.engine is not None and use.engine.has_engine_process
    return has_process and find_tied_head(read_config(use.model), use.model.path) == "alone"


@model_requirement(
    "data.max_prompt_length={use.lengths.max_prompt_length} + data.max_response_length = {use.lengths.max_length}",
    "{use} has {}",
    "Lower one of the two keys",
)
def sequences_exceed_the_context(use: ModelUse, context: CheckContext) -> object:
    if use.lengths is None or use.engine is None or not use.engine.has_engine_process:
        return None
    text = use.config.get_text_config()
    is_scaled = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default") not in ("default", "dynamic")
    limits = {"a context length of {} tokens": None if is_scaled else getattr(text, "max_position_embeddings", None)}
    families = load_engine_class(use.engine.name).without_mixed_windows
    if text.model_type in families and "full_attention" in text.layer_types:
        limits["layers with a sliding window of {} tokens, which vLLM does not support"] = text.sliding_window
    return next((part.format(n) for part, n in limits.items() if n is not None and use.lengths.max_length > n), "")


@model_requirement(
    "{use.engine_section}.tensor_model_parallel_size={use.engine.tensor_model_parallel_size}",
    "{use} has {0} attention heads",
    "Set {use.engine_section}.tensor_model_parallel_size to one of {1}",
)
def engines_split_heads(use: ModelUse, context: CheckContext) -> object:
    heads = getattr(use.config.get_text_config(), "num_attention_heads", None)
    return use.engine and heads and heads % use.engine.tensor_model_parallel_size and (heads, list_divisors(heads))


@model_requirement(
    "{use.engine_section}.expert_parallel_size={use.engine.expert_parallel_size}",
    "{use} is not a mixture of experts",
    "Set {use.engine_section}.expert_parallel_size=1",
)
def engines_lack_experts(use: ModelUse, context: CheckContext) -> object:
    return use.engine and use.engine.expert_parallel_size > 1 and ExpertSizes.from_config(use.config) is None


@model_requirement(
    "{use.ulysses_section}ulysses_sequence_parallel_size={use.ulysses_size}",
    "{use} {0}",
    "Set {use.ulysses_section}ulysses_sequence_parallel_size={1}",
)
def sequence_groups_split_heads(use: ModelUse, context: CheckContext) -> object:
    heads = getattr(use.config.get_text_config(), "num_attention_heads", 0)
    if use.model.trust_remote_code and hasattr(use.config, "auto_map"):
        reason, possible = "has its own modeling code, whose attention cannot be split", 1
    elif reason := describe_stateful_layers(use.config):
        possible = 1
    else:
        reason = f"has {heads} attention heads" if not heads or heads % use.ulysses_size else ""
        possible = math.gcd(heads, use.ulysses_size) if heads else 1
    return use.ulysses_size > 1 and reason and (reason, possible)


@model_requirement("{0}", "{use} {1} (docs/parallelism.md)", "Remove {0}")
def routers_are_unsupported(use: ModelUse, context: CheckContext) -> object:
    coef, replays = use.model.router_aux_loss_coef, use.engine is not None and use.engine.router_replay
    if not use.fsdp or use.policy or not (coef or replays):  # only the policy, and models of fine-tuning
        return None
    keys = [f"{use.key.removesuffix('path')}router_aux_loss_coef={coef:g}"] if coef else []
    setting = " and ".join([*keys, f"{use.engine_section}.router_replay=true"] if replays else keys)
    if RouterHooks.wrap_routers(load_without_weights(use.model)) is None:
        return setting, "is not a mixture of experts with supported routers"
    lacks_loss = coef and not hasattr(use.config.get_text_config(), "router_aux_loss_coef")
    return lacks_loss and (setting, "has no load-balancing loss in transformers")


@model_requirement(
    "{use.ulysses_section}optim.name=trpo", "{use} is a mixture of experts, whose routers make the KL jump", "Set adamw"
)
def routers_disturb_trpo(use: ModelUse, context: CheckContext) -> object:
    return use.optimizer == "trpo" and RouterHooks.wrap_routers(load_without_weights(use.model)) is not None


@model_requirement(
    "{use.fsdp_section}.ep_size={use.fsdp.ep_size}", "{use} has {0}", "Set {use.fsdp_section}.ep_size to {1}"
)
def experts_cannot_be_split(use: ModelUse, context: CheckContext) -> object:
    if use.fsdp is None or (size := use.fsdp.ep_size) == 1:
        return None
    experts, shards = find_experts(load_without_weights(use.model)), use.fsdp.count_shards(use.num_ranks)
    counts = {int(module.num_experts) for module in experts}  # type: ignore[arg-type]
    if not experts:
        return "no experts that can be split (docs/parallelism.md)", "1"
    if any(count % size for count in counts):
        return f"{max(counts)} experts in a layer", f"one of {list_divisors(*counts, shards)}"
    sharing = shards // size  # FSDP shards dimension 1 of the experts over these ranks
    rows = {parameter.shape[1] for module in experts for parameter in module.parameters()}
    uneven = [count for count in rows if count % sharing]
    return uneven and (f"experts of {uneven[0]} rows, shared by {sharing} ranks", "another size")


@model_requirement("{0}lora_rank={use.model.lora_rank}", "{use} cannot have the adapters: {1}", "{2}")
def adapters_lack_layers(use: ModelUse, context: CheckContext) -> object:
    try:
        if use.fsdp and use.model.lora_rank:
            resolve_target_modules(load_without_weights(use.model), use.model)
    except ValueError as error:  # with the text "REASON. FIX."
        reason, _, fix = str(error).removesuffix(".").partition(". ")
        return use.key.removesuffix("path"), reason, fix
    return None


@model_requirement("teacher.self_teacher.context", "{use} is a vision-language model", "Set null, or use a text model")
def self_teacher_reads_images(use: ModelUse, context: CheckContext) -> object:
    return use.self_teacher_length and reads_images(use.config)


@model_requirement(
    "teacher.self_teacher.max_prompt_length + data.max_response_length = {use.self_teacher_length}",
    "{use} has a context length of {} tokens",
    "Lower one of the two keys",
)
def self_teacher_exceeds_the_context(use: ModelUse, context: CheckContext) -> object:
    limit = getattr(use.config.get_text_config(), "max_position_embeddings", None)
    return limit is not None and use.self_teacher_length > limit and limit


def choose_kernels(model: Model, configured: Model) -> Model:
    """Return the resolved model section with kernels that the architecture supports.

    Liger kernels are disabled on architectures on which they are not tested. Layers with recurrent state need padded
    rows. configured: the section before `resolve_model`. Raises ValueError if it sets a kernel that is not supported.
    """
    config = load_config(model)
    if configured.attention == "auto" and describe_stateful_layers(config):
        model = model.model_copy(update={"attention": "padded"})
    check_layers(config, model.path, get_attention_kernel(model))
    if not model.use_liger:
        return model
    kind = config.model_type
    if configured.use_liger is True and kind not in LIGER_ARCHITECTURES:
        raise ValueError(
            f"model.use_liger=true is not tested on {kind!r} models ({model.path}), only on "
            f"{', '.join(LIGER_ARCHITECTURES)}. Set model.use_liger=auto, or model.use_torch_compile=true."
        )
    return model.model_copy(update={"use_liger": kind in LIGER_ARCHITECTURES})
