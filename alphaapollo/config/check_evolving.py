"""Combinations of evolving.main's keys that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.check_common import (
    check_files,
    check_model,
    check_python_file,
    check_required,
    check_user_files,
)
from alphaapollo.config.check_engine import check_engine, check_nucleus
from alphaapollo.config.check_folder import check_folder
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.notices import OF_TRAINING, void_lines
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import EvolvingConfig, Role, ServedModel
from alphaapollo.config.schema.base import Device
from alphaapollo.utils.registry import nearest

VOID = [  # (key, why): of sections that others have, too
    *((f"rollout.{name}", "roles.SLOT says how a role samples") for name in ("temperature", "top_p", "top_k")),
    *((key, "data.n_samples counts the solutions") for key in ("rollout.n", "env.rollout.n")),
    *((f"rollout.{name}", "each model has one engine") for name in ("num_engines", "data_parallel_size")),
    *((key, "it is about training") for key in OF_TRAINING if key.startswith("rollout.")),
    *((f"env.{name}", "evolving.memory_* says what is remembered") for name in ("history_length", "memory_type")),
    ("env.max_tokens_per_turn", "roles.proposer.max_tokens says it"),
]


def check_evolving(config: EvolvingConfig, num_gpus: int) -> list[str]:
    """Notices about keys without effect; ConfigError names every impossible combination.

    num_gpus: of this machine, where it serves a model."""
    device = resolve_device(config.trainer.device, num_gpus)
    problems = [
        *check_required("data.path", config.data.path),
        *check_files("data.path", config.data.path),
        *_check_models(config),
        *_check_roles(config),
        *_check_money(config),
        *_check_engines(config, device, num_gpus),
        *check_python_file("evolving.custom_module", config.evolving.custom_module),
        *check_user_files(config.env, config.reward, config.custom_reward_function),
        *_check_environment(config),
        *check_folder(config.trainer),
    ]
    if problems:
        raise ConfigError(problems)
    return [*void_lines(config, VOID), *_notices(config)]


def roles_of(config: EvolvingConfig) -> dict[str, Role]:
    """The sections of `roles` by their names."""
    return {name: getattr(config.roles, name) for name in type(config.roles).model_fields}


def _check_models(config: EvolvingConfig) -> Iterator[str]:
    if not config.models:
        yield (
            "models: required, got none. Give one that this run serves, models.policy.path=MODEL, or a server's: "
            "'models={policy: {base_url: http://localhost:8000/v1, name: NAME}}'."
        )
    for name, model in config.models.items():
        key = f"models.{name}"
        if bool(model.path) == bool(model.base_url or model.name):
            yield f"{key}: it needs either a path (this run serves it) or a base_url and a name (a server does)."
        elif model.path:
            yield from check_model(f"{key}.path", model.path)
        elif not model.name:
            yield f"{key}.name: required with base_url: what the server calls the model."
    named = {f"evolving.branches[{index}]": name for index, name in enumerate(config.evolving.branches)}
    named |= {f"roles.{slot}.model": role.model for slot, role in roles_of(config).items() if role.model}
    for key, name in named.items():
        if config.models and name not in config.models:
            near = nearest(name, config.models, count=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            yield f"{key}={name}: no such model in `models`.{hint} Known: {', '.join(config.models)}."


def _check_roles(config: EvolvingConfig) -> Iterator[str]:
    if not config.roles.proposer.plugin:
        yield "roles.proposer.plugin: required: without a proposer there is nothing to judge."
    if config.evolving.votes and not config.roles.verifier.plugin:
        yield f"evolving.votes={config.evolving.votes}: roles.verifier.plugin is empty. Name one, or set votes to 0."
    if config.evolving.select == "tournament" and not config.roles.referee.plugin:
        yield "evolving.select=tournament: roles.referee.plugin is empty. Name one, or set evolving.select=vote."
    for slot, role in roles_of(config).items():
        yield from check_nucleus(f"roles.{slot}", role.top_p, -1)
        if role.max_tokens and role.max_tokens > config.data.max_response_length:
            yield (
                f"roles.{slot}.max_tokens={role.max_tokens}: over data.max_response_length="
                f"{config.data.max_response_length}, for which engines are built. Raise that, or lower it."
            )


def _check_money(config: EvolvingConfig) -> Iterator[str]:
    if config.budget.money is not None and not any(map(_has_price, config.models.values())):
        yield f"budget.money={config.budget.money:g}: no model has a price. Give models.NAME.price_in and .price_out."


def _has_price(model: ServedModel) -> bool:
    return bool(model.price_in or model.price_out)


def _check_engines(config: EvolvingConfig, device: Device, num_gpus: int) -> Iterator[str]:
    own = [name for name, model in config.models.items() if model.path]
    if not own:
        return
    rollout = config.rollout
    yield from check_engine("rollout", rollout, config.data, device)
    if device == "cuda" and not num_gpus:
        yield "trainer.device: got cuda, but this machine has no GPU. Set trainer.device=auto or cpu."
    share = rollout.gpu_memory_utilization
    if device == "cuda" and rollout.name == "vllm" and share * len(own) > 1:
        yield (
            f"rollout.gpu_memory_utilization={share:g}: {len(own)} engines ({', '.join(own)}) share the GPU. Set "
            f"{1 / len(own):.2f} or less, or serve all but one elsewhere (base_url)."
        )


def _check_environment(config: EvolvingConfig) -> Iterator[str]:
    env = config.env
    if env.action_format != "tags":
        yield (
            f"env.action_format={env.action_format}: models may be anywhere here, and answer in text. Leave it out "
            "(tags)."
        )
    if env.context != "append":
        yield f"env.context={env.context}: an episode is shown whole here; evolving.memory_* is about past solutions."


def _notices(config: EvolvingConfig) -> Iterator[str]:
    evolving = config.evolving
    if evolving.rounds > 1 and not evolving.memory_size:
        yield "evolving.memory_size=0: the rounds do not build on each other; all solutions are independent."
    if evolving.rounds > 1 and not evolving.votes:
        yield "evolving.votes=0: nobody judges; memory and choice go by brevity alone."
    greedy = config.roles.proposer.temperature == 0
    if greedy and config.data.n_samples > 1:
        yield f"data.n_samples={config.data.n_samples} at roles.proposer.temperature=0: the solutions will be equal."
    if config.roles.verifier.temperature == 0 and evolving.votes > 1:
        yield f"evolving.votes={evolving.votes} at roles.verifier.temperature=0: the verdicts will be equal."
