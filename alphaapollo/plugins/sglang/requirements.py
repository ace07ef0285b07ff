"""What SGLang cannot do, and models that it does not support: rows as in config/requirements.py."""

from __future__ import annotations

from functools import partial

from alphaapollo.config.requirements import CheckContext, Requirement, requirement
from alphaapollo.config.schema import Rollout
from alphaapollo.engines.factory import load_engine_class
from alphaapollo.models.load import find_tied_head, read_config
from alphaapollo.models.moe_routing import ExpertSizes
from alphaapollo.planning.model_requirements import ModelUse

REQUIREMENTS: list[Requirement] = []
rollout_requirement = partial(requirement, Rollout, table=REQUIREMENTS)
model_requirement = partial(requirement, ModelUse, "{use.engine_section}.name=sglang", table=REQUIREMENTS)
USE_VLLM = "Set {use.engine_section}.name=vllm"


@rollout_requirement("name", "this project has not run SGLang on GPUs (docs/engines.md)", "Set vllm", is_error=False)
def sglang_is_untested_on_gpus(rollout: Rollout, context: CheckContext) -> object:
    return context.device == "cuda"


@rollout_requirement("name tensor_model_parallel_size", "SGLang's engines have one process on a CPU", "Set it to 1")
def sglang_splits_engines_on_cpus(rollout: Rollout, context: CheckContext) -> object:
    return context.device == "cpu" and rollout.tensor_model_parallel_size > 1


@rollout_requirement("name min_p", "SGLang has no min_p for requests with a seed", "Set min_p=0, or name=vllm")
def seeds_exclude_min_p(rollout: Rollout, context: CheckContext) -> object:
    return rollout.min_p > 0


@rollout_requirement(
    "name lora /trainer.max_staleness",
    "SGLang replaces an adapter only while no request runs",
    "Set rollout.name=vllm, or rollout.lora=merged",
)
def adapters_in_flight(rollout: Rollout, context: CheckContext) -> object:
    return rollout.lora == "adapter" and context.config.engine_staleness


@model_requirement("there is no environment with SGLang: {}", "Run `make setup-sglang`")
def environment_of_sglang(use: ModelUse, case: CheckContext) -> object:
    python = load_engine_class("sglang").find_python()
    return python and not python.is_file() and python


@model_requirement("{use} has experts and tied embeddings, whose output head SGLang does not load", USE_VLLM)
def tied_experts_of_sglang(use: ModelUse, case: CheckContext) -> object:
    return ExpertSizes.from_config(use.config) is not None and use.config.tie_word_embeddings


@model_requirement(
    "{use} has an output head that differs from the embedding, although its config.json ties them, which this engine "
    "does not load",
    "Save the model again with transformers, or set {use.engine_section}.name=hf",
)
def tied_heads_of_sglang(use: ModelUse, case: CheckContext) -> object:
    return find_tied_head(read_config(use.model), use.model.path) == "own"
