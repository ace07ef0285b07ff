"""Read and check what several commands need before workers start: machine, environment, tokenizer, prompts, rewards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from alphaapollo.config.check import describe_ineffective_keys
from alphaapollo.config.keys import flatten_maps
from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import (
    Config,
    CustomRewardFunction,
    Data,
    Env,
    GenerationConfig,
    GenerationData,
    InferenceConfig,
    Model,
    Reward,
    SftConfig,
    TuningConfig,
)
from alphaapollo.controller.placement import Machine, detect_machine
from alphaapollo.data.cache import load_or_compute
from alphaapollo.data.files import HELD_OUT, TRAIN, name_splits, resolve_entry
from alphaapollo.data.findings import DataFinding
from alphaapollo.data.images import collect_images, load_image_processor
from alphaapollo.data.prompts import apply_length_limit, list_text_notices, load_prompts
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.engines.factory import load_engine_class
from alphaapollo.environments import check_environment
from alphaapollo.environments.base import EnvironmentSpec, find_tool_sources
from alphaapollo.environments.classes import load_environment_module
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.planning.template import try_chats
from alphaapollo.planning.trials import try_ground_truths, try_reward_function
from alphaapollo.rewards.components import check_component_names
from alphaapollo.rewards.grader_processes.client import check_reward_function
from alphaapollo.rewards.registry import check_judges, check_prompts_are_gradable, leave_out_missing_answers
from alphaapollo.runs.input_digests import digest_file
from alphaapollo.types import JsonObject, Prompt
from alphaapollo.utils.heartbeat import HEARTBEAT

RunConfig = Config | TuningConfig | InferenceConfig


def detect_node_resources(config: Config | TuningConfig | GenerationConfig) -> Machine:
    """Return the cores, memory and GPUs of this machine. If RAY_ADDRESS is set, join that Ray cluster and return
    the resources of one of its nodes."""
    if os.environ.get("RAY_ADDRESS") and resolve_controller(config.trainer) == "ray":
        from alphaapollo.controller.ray_cluster import join_cluster

        return join_cluster(config.trainer, config.actor_rollout_ref.rollout if isinstance(config, Config) else None)
    return detect_machine()


def explain_missing_cluster(config: RunConfig) -> str:
    """Return an error message if the run needs several nodes but RAY_ADDRESS is not set, else ""."""
    nodes = getattr(config.trainer, "nnodes", 1)
    nodes += config.actor_rollout_ref.rollout.nnodes if isinstance(config, Config) else 0
    if nodes == 1 or os.environ.get("RAY_ADDRESS"):
        return ""
    return (
        f"{nodes} nodes (nnodes) need a cluster, but RAY_ADDRESS is not set. Start Ray on every node and set "
        "RAY_ADDRESS (docs/scaling.md), or train on one node."
    )


def find_local_paths(config: Config | TuningConfig | GenerationConfig) -> dict[str, str]:
    """Return {configuration key: path} of the local files and folders that every node needs, because workers use them.
    Data files are left out, because only the driver reads them."""
    values = flatten_maps(config.model_dump(exclude={"data", "trainer"}))
    engines = {key: load_engine_class(value) for key, value in values.items() if key.endswith("rollout.name")}
    pythons = {key: str(python) for key, engine in engines.items() if (python := engine.find_python())}
    items = ((key, item) for key, value in values.items() for item in (value if isinstance(value, list) else [value]))
    texts = ((key, item) for key, item in items if isinstance(item, str))
    paths = {key: text for key, text in texts if ("/" in text or text.endswith(".py")) and Path(text).exists()}
    return pythons | paths


def find_environment_spec(env: Env) -> EnvironmentSpec:
    """Return the specification of the environment `env.env_name`. Raises ValueError if the environment is unknown or
    its settings are invalid."""
    load_environment_module(env)
    return check_environment(env)


def collect_environment_notices(
    config: Config | GenerationConfig | SftConfig, environment: EnvironmentSpec
) -> list[str]:
    """Return a notice for each key of rewards or tools that the user has set but this environment does not use."""
    env, unused = config.env, []
    if not environment.is_graded(env) and not environment.own_prompts:
        keys = ["custom_reward_function.path", "reward.components", "reward.custom_module"]
        if not (isinstance(config, Config) and config.reward_model.enable):  # reward.required may name its score
            keys.append("reward.required")
        unused += [(key, f"env.env_name is {env.env_name}, which scores itself") for key in keys]
    if not (environment.list_tools(env) or find_tool_sources(env)):
        limits = [f"env.tool_limits.{name}" for name in type(env.tool_limits).model_fields]
        unused += [(key, f"env.env_name is {env.env_name}, and no tools are given to it") for key in limits]
    elif env.max_steps == 1:
        tools = ", ".join([*environment.list_tools(env), *env.mcp_servers])
        notice = f"env.max_steps=1 ends an episode before the model sees the output of {tools}."
        return [*describe_ineffective_keys(config, unused), notice]
    return describe_ineffective_keys(config, unused)


def make_renderer(env: Env, model: Model, template_arguments: Mapping[str, object]) -> Renderer:
    """Return the prompt renderer that the rollout workers will use.

    Raises ValueError if the tokenizer, a tool, a search index or an MCP server is missing, or if env.action_format does
    not work with the chat template.
    """
    renderer = load_renderer(model, template_arguments)
    schemas = asyncio.run(_list_tool_schemas(env))
    if env.action_format == "tags":
        _check_template_keeps_history(env, renderer)
        return renderer
    if not schemas:
        raise ValueError(
            "env.action_format=chat_template needs tools. Set env.tools or env.mcp_servers, or env.action_format=tags."
        )
    tool_renderer = ToolRenderer(renderer.tokenizer, schemas, template_arguments, renderer.images, model.path)
    tool_renderer.check_template_shows_tools(in_append_context=env.context == "append")
    _check_template_keeps_history(env, tool_renderer)
    return tool_renderer


def load_renderer(model: Model, template_arguments: Mapping[str, object]) -> Renderer:
    """Return a renderer of chats without tools. Raises ValueError if the tokenizer does not fit the model."""
    from alphaapollo.models.load import check_vocabulary_size  # imports torch

    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
    check_vocabulary_size(model, tokenizer, "model.path")
    images = load_image_processor(model.path, tokenizer, model.trust_remote_code)
    return Renderer(tokenizer, template_arguments, images, model.path)


async def _list_tool_schemas(env: Env) -> list[JsonObject]:
    tools = await open_toolbox(env)
    if tools is None:
        return []
    await tools.close()
    return tools.schemas()


def _check_template_keeps_history(env: Env, renderer: Renderer) -> None:
    """Raise ValueError if env.context=append is combined with a chat template that rewrites earlier turns."""
    if env.max_steps == 1 or env.context != "append" or not renderer.tokenizer.chat_template:
        return
    if renderer.rewrites_history:
        raise ValueError(
            "the chat template changes earlier answers (e.g. it drops their reasoning), so the chats of training would "
            "differ from those of generation. Set env.context=memory (a new prompt every turn), or use a chat_template "
            "that keeps earlier turns."
        )


@HEARTBEAT.record_call("read prompts")
def read_prompts(
    files: str | list[str],
    files_key: str,
    renderer: Renderer,
    data: Data | GenerationData,
    select: Callable[[list[Prompt]], list[Prompt]] = list,
) -> tuple[list[Prompt], list[str], list[DataFinding]]:
    """Read the prompts of data files. Drops or truncates prompts over data.max_prompt_length. Returns prompts, notices
    and findings. files_key: configuration key of `files`. select: selects prompts before they are rendered."""
    notices, findings = list[str](), list[DataFinding]()
    try:
        files = name_splits(files, TRAIN if files_key == "data.train_files" else HELD_OUT, notices)
        chosen = select(leave_out_missing_answers(_load_prompts(files, renderer, data, findings), findings))
        with_images = [prompt.id for prompt in chosen if collect_images(prompt.content)]
        if with_images and renderer.images is None:
            raise ValueError(
                f"{len(with_images)} of {len(chosen)} prompts have images (the first is row {with_images[0]}), "
                "but the model does not read images. Use a family of docs/vision.md."
            )
        try_chats(renderer, chosen)
        texts = [prompt.content for prompt in chosen if isinstance(prompt.content, str)]
        notices += list_text_notices(texts, renderer)
        prompts, num_long = apply_length_limit(chosen, renderer, data.max_prompt_length, data.truncation)
    except ValueError as error:
        raise ValueError(f"{files_key}: {error}") from error
    if num_long:
        treatment = "dropped" if data.truncation == "drop" else f"truncated ({data.truncation})"
        notices.append(f"{num_long} of {len(chosen)} prompts exceed data.max_prompt_length and are {treatment}.")
    return prompts, [f"{files_key}: {notice}" for notice in notices], findings


def _load_prompts(
    files: list[str], renderer: Renderer, data: Data | GenerationData, findings: list[DataFinding]
) -> list[Prompt]:
    """Load the prompts of data files, from the cache if their content is known. Appends to `findings`."""

    keys = {"system_prompt": data.system_prompt, "ground_truth_key": data.ground_truth_key}

    def load() -> tuple[list[Prompt], list[DataFinding]]:
        found: list[DataFinding] = []
        return load_prompts(files, data.prompt_key, data.allow_image_urls, renderer, found, **keys), found

    sources = [resolve_entry(entry) for entry in files]
    digests = [digest_file(file) for source in sources for file in source.files]
    digests += [str(entry) for source in sources for entry in source.entries]  # rows name their folders
    prompts, prompt_findings = load_or_compute(renderer, (files, digests, data.prompt_key, keys), load)
    findings += prompt_findings
    return prompts


def check_rewards(
    prompts: Sequence[Prompt],
    reward: Reward,
    custom: CustomRewardFunction,
    needs_grading: bool = True,
    needs_accuracy: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """Check the reward functions. Returns notices, and for built-in graders {data source: how many of its first rows
    score with their own ground truth}.

    needs_grading: whether every prompt needs a reward function; False if the environment scores itself.
    needs_accuracy: settings that need to know which answers are right. Raises ValueError if a reward function or
    component is missing or fails, some prompts have no reward function, or nothing says which answers are right.
    """
    is_custom = bool(custom.path or reward.custom_module)
    notices, truths = list[str](), dict[str, str]()
    if not is_custom:
        check_component_names(reward.components, reward.required)
    elif not needs_grading:
        check_reward_function(reward, custom)
    if needs_grading and not custom.path:
        check_prompts_are_gradable(prompts)
        truths, notices = try_ground_truths(prompts, reward)
    judges = check_judges(prompts, reward, bool(custom.path)) if needs_grading else set()
    if is_custom and needs_grading:
        notices += asyncio.run(try_reward_function(prompts, reward, custom, needs_accuracy))
    unused = {
        f"reward.judge.model={reward.judge.model}": bool(reward.judge.model) and not judges,
        "reward.judge.backend=policy": reward.judge.backend == "policy" and not judges,
        "reward.rubric.criteria": bool(reward.rubric.criteria) and "rubric" not in judges,
    }
    cause = "custom_reward_function.path grades all rows" if custom.path else "no data_source needs it"
    notices += [
        f"{key} has no effect: {cause}, and reward.components names no judge (docs/rewards.md)."
        for key, is_unused in unused.items()
        if is_unused
    ]
    return notices, truths
