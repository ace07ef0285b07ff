"""Python API: `from alphaapollo import rl, sft, dpo, evaluate, evolve`.

run = rl({"algorithm": "grpo", "actor_rollout_ref.model.path": "model", ...}, "env.rollout.n=8", reward=score)
run.metrics, run.model, run.plot("critic/score/mean")

The configuration is a dict (dotted or nested keys) or a YAML file, followed by KEY=VALUE overrides as on the command
line. A run is a child process that ends with this process (run_process.py).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel

from alphaapollo.cli.run_process import OnIteration, run_in_child_process, write_objects
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import format_value, get_value, list_keys, list_keys_of_map_type
from alphaapollo.config.load import find_command_module, find_shipped_config_folder, load_config
from alphaapollo.config.schema import Config, DpoConfig, EvolvingConfig, GenerationConfig, SftConfig
from alphaapollo.results import Evaluation, EvolutionRun, TrainedRun
from alphaapollo.utils.json_types import JsonObject, to_json_value

if TYPE_CHECKING:
    from alphaapollo.algorithms.advantages import Estimator
    from alphaapollo.evolving.roles import Role

Settings = Mapping[str, object] | str | Path | None
ConfigT = TypeVar("ConfigT", bound=Config | SftConfig | DpoConfig | GenerationConfig | EvolvingConfig)


def rl(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., object] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., object]] = (),
    estimator: Callable[..., object] | Estimator | None = None,
    agent: Callable[..., object] | None = None,
    on_iteration: OnIteration | None = None,
    show: bool = True,
) -> TrainedRun:
    """Train with reinforcement learning. If the run folder has checkpoints, the run resumes from the newest one.

    Args:
        config: Keys of main_ppo as a dict, or the path of a YAML file (docs/config.md).
        overrides: KEY=VALUE or presets, e.g. "trainer.seed=1", "algorithm=dapo".
        reward: Reward function, `(prompt, completion)` or `(prompt, trajectory)` (docs/rewards.md).
        environment: Class that implements environments/base.py; with `reward`, the reward function scores its episodes.
        tools: Functions with types and a docstring, for an environment that calls tools.
        estimator: Advantage estimator `(inputs, config) -> Advantages`, or an `Estimator` that declares its needs.
        agent: Program `run(task, endpoint)` that calls the model over HTTP (docs/agents.md). With `reward`, the reward
            function grades its last answer, and the reward that the program returns is added.
        on_iteration: Callback `on_iteration(step, metrics)` after each iteration; an exception in it ends the run.
        show: Whether to print the output of the run.

    Raises:
        ValueError: The configuration or the data is invalid; the run did not start.
        RunFailed: The run failed.
        KeyboardInterrupt: Ctrl-C. All processes have ended; the same call resumes from the newest checkpoint.
    """
    objects = {"reward": reward, "environment": environment, "tools": tools, "estimator": estimator, "agent": agent}
    return TrainedRun(*_run_program(Config, "ppo", config, overrides, on_iteration, show, objects))


def sft(
    config: Settings = None, *overrides: str, on_iteration: OnIteration | None = None, show: bool = True
) -> TrainedRun:
    """Run supervised fine-tuning (main_sft). Arguments, result and errors as in `rl`, with the keys of main_sft."""
    return TrainedRun(*_run_program(SftConfig, "sft", config, overrides, on_iteration, show))


def dpo(
    config: Settings = None, *overrides: str, on_iteration: OnIteration | None = None, show: bool = True
) -> TrainedRun:
    """Train on preferences (main_dpo). Arguments, result and errors as in `rl`, with the keys of main_dpo."""
    return TrainedRun(*_run_program(DpoConfig, "dpo", config, overrides, on_iteration, show))


def evaluate(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., object] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., object]] = (),
    agent: Callable[..., object] | None = None,
    show: bool = True,
) -> Evaluation:
    """Sample answers and score them. Arguments and errors as in `rl`, with the keys of main_generation."""
    objects = {"reward": reward, "environment": environment, "tools": tools, "agent": agent}
    return Evaluation(*_run_program(GenerationConfig, "generation", config, overrides, None, show, objects))


def evolve(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., object] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., object]] = (),
    roles: Mapping[str, type[Role]] | None = None,
    agent: Callable[..., object] | None = None,
    on_round: OnIteration | None = None,
    show: bool = True,
) -> EvolutionRun:
    """Improve a model's answers without training (evolving.main, docs/evolving.md). Resumes an interrupted call.

    Args:
        roles: Classes that replace built-in roles, e.g. `{"verifier": MyVerifier}`. Their methods: `build` and `read`.
        on_round: Callback `on_round(number, metrics)` after each round; an exception in it ends the run.

    Other arguments and errors as in `rl`, with the keys of evolving.main.
    """
    objects = {"reward": reward, "environment": environment, "tools": tools, "roles": roles, "agent": agent}
    return EvolutionRun(*_run_program(EvolvingConfig, "evolving", config, overrides, on_round, show, objects))


def _run_program(
    schema: type[ConfigT],
    config_name: str,
    settings: Settings,
    overrides: Sequence[str],
    on_iteration: OnIteration | None,
    show: bool,
    objects: Mapping[str, Any] = {},
) -> tuple[Path, ConfigT]:
    """Run a command in a child process and wait for its end. Returns the run folder and the configuration."""
    with tempfile.TemporaryDirectory() as scratch:
        file = settings
        if isinstance(settings, Mapping):
            file = Path(scratch) / "settings.yaml"
            file.write_text(yaml.safe_dump(nest_settings(settings, schema), allow_unicode=True), encoding="utf-8")
        words = [*(["--config", str(file)] if file is not None else []), *overrides]
        config = load_config(schema, config_name, words)
        folder = config.trainer.folder.absolute()
        object_words = write_objects(folder.with_name(f".{folder.name}.objects"), **objects)
        with_objects = load_config(schema, config_name, [*words, *object_words])
        _check_no_key_set_twice(config, object_words)
        module = f"alphaapollo.{find_command_module(config_name)}"
        run_in_child_process(module, [*words, *object_words], folder, on_iteration, show)
    return folder, with_objects


def nest_settings(settings: Mapping[str, object], schema: type[BaseModel]) -> JsonObject:
    """Convert settings such as `{"algorithm": "dapo", "env.seed": 1}` to nested YAML values; presets become `defaults`.

    Names that users choose, e.g. in `models`, may contain dots. Raises ConfigError for a key that is set twice.
    """
    settings = json.loads(json.dumps(dict(settings), default=to_json_value))  # Path and NumPy to plain values
    groups = {path.name for path in find_shipped_config_folder().iterdir() if path.is_dir()}
    presets = {key: value for key, value in settings.items() if isinstance(value, str) and key in groups}
    defaults = [*({group: preset} for group, preset in presets.items()), "_self_"]
    values: JsonObject = {"defaults": defaults} if presets else {}
    for key, value in settings.items():
        if key not in presets:
            _set_nested_value(values, key.split("."), value, list_keys_of_map_type(schema))
    return values


def _set_nested_value(values: JsonObject, key_parts: Sequence[str], value: object, map_keys: Sequence[str]) -> None:
    *sections, last = key_parts
    key, inside = ".".join(key_parts), values
    for part in sections:
        inside = inside.setdefault(part, {})
        if not isinstance(inside, dict):
            raise ConfigError(f"{key} cannot be set, because {part} is set to a single value. Remove one of them.")
    if isinstance(value, dict):
        for name, inner in value.items():
            _set_nested_value(values, [*key_parts, *([name] if key in map_keys else name.split("."))], inner, map_keys)
    elif last in inside:
        raise ConfigError(f"{key} is set twice. Set it once.")
    else:
        inside[last] = value


def _check_no_key_set_twice(config: BaseModel, object_overrides: Sequence[str]) -> None:
    """Raise ConfigError if a key, except algorithm.adv_estimator, is set both to a value and by a Python object."""
    known = list_keys(type(config))
    for key in (override.partition("=")[0] for override in object_overrides):
        if key != "algorithm.adv_estimator" and (value := get_value(config, key)) != known[key].default:
            shown = f"{key}={format_value(value)}"
            raise ConfigError(f"{shown} is set, but the call also passes a Python object for it. Remove one of them.")
