"""Python API: `from alphaapollo import rl, sft, dpo, evaluate, evolve`.

run = rl({"algorithm": "grpo", "actor_rollout_ref.model.path": "model", ...}, "env.rollout.n=8", reward=score)
run.metrics, run.model, run.plot("critic/score/mean")

The configuration is a dict (dotted or nested keys) or a YAML file, followed by KEY=VALUE overrides, as on the command
line. The run is a separate process that ends with this one (run_process.py).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel

from alphaapollo.cli.python_objects import PythonObjects
from alphaapollo.cli.results import Evaluation, EvolvedRun, TrainedRun
from alphaapollo.cli.run_process import OnIteration, run_to_end
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import format_value, get_value, list_keys, list_map_keys
from alphaapollo.config.load import find_module, find_shipped_configs, load_config
from alphaapollo.config.schema import Config, DpoConfig, EvolvingConfig, GenerationConfig, SftConfig
from alphaapollo.observability.json_values import to_json_value

if TYPE_CHECKING:
    from alphaapollo.algorithms.advantages import Estimator
    from alphaapollo.evolving.roles import Role

Settings = Mapping[str, Any] | str | Path | None
ConfigT = TypeVar("ConfigT", bound=Config | SftConfig | DpoConfig | GenerationConfig | EvolvingConfig)


def rl(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., Any] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    estimator: Callable[..., Any] | Estimator | None = None,
    on_iteration: OnIteration | None = None,
    show: bool = True,
) -> TrainedRun:
    """Train with reinforcement learning. Resumes like the command.

    Args:
        config: Keys of main_ppo as a dict, or the path of a YAML file (docs/config.md).
        overrides: KEY=VALUE or presets, e.g. "trainer.seed=1", "algorithm=dapo".
        reward: Reward function, `(prompt, completion)` or `(prompt, trajectory)` (docs/rewards.md).
        environment: Class that implements environments/base.py; with `reward`, the reward function grades it.
        tools: Functions with types and a docstring, for an environment that calls tools.
        estimator: Advantage estimator `(inputs, config) -> Advantages`, or an `Estimator` that declares its needs.
        on_iteration: Callback `on_iteration(step, metrics)` after each iteration; an exception in it ends the run.
        show: Whether to print the output of the run.

    Raises:
        ValueError: The run was refused before its start.
        RunFailed: The run failed.
        KeyboardInterrupt: Ctrl-C. All processes have ended; the same call resumes from the newest checkpoint.
    """
    objects = PythonObjects(reward, environment, tools, estimator)
    return TrainedRun(*_run_program(Config, "ppo", config, overrides, objects, on_iteration, show))


def sft(
    config: Settings = None, *overrides: str, on_iteration: OnIteration | None = None, show: bool = True
) -> TrainedRun:
    """Run supervised fine-tuning with the keys of main_sft. Arguments, result and errors as in `rl`."""
    return TrainedRun(*_run_program(SftConfig, "sft", config, overrides, PythonObjects(), on_iteration, show))


def dpo(
    config: Settings = None, *overrides: str, on_iteration: OnIteration | None = None, show: bool = True
) -> TrainedRun:
    """Train on preferences with the keys of main_dpo. Arguments, result and errors as in `rl`."""
    return TrainedRun(*_run_program(DpoConfig, "dpo", config, overrides, PythonObjects(), on_iteration, show))


def evaluate(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., Any] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    show: bool = True,
) -> Evaluation:
    """Sample and score with the keys of main_generation. Arguments and errors as in `rl`."""
    objects = PythonObjects(reward, environment, tools)
    return Evaluation(*_run_program(GenerationConfig, "generation", config, overrides, objects, None, show))


def evolve(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., Any] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    roles: Mapping[str, type[Role]] | None = None,
    on_round: OnIteration | None = None,
    show: bool = True,
) -> EvolvedRun:
    """Improve answers at inference time with the keys of evolving.main. Resumes an interrupted call.

    Args:
        roles: {slot: class with `build` and `read`} (docs/evolving.md), e.g. `{"verifier": Mine}`.
        on_round: Callback `on_round(number, metrics)` after each round; an exception in it ends the run.

    Other arguments and errors as in `rl`.
    """
    objects = PythonObjects(reward, environment, tools, roles=roles or {})
    return EvolvedRun(*_run_program(EvolvingConfig, "evolving", config, overrides, objects, on_round, show))


def _run_program(
    schema: type[ConfigT],
    name: str,
    settings: Settings,
    overrides: Sequence[str],
    objects: PythonObjects,
    on_iteration: OnIteration | None,
    show: bool,
) -> tuple[Path, ConfigT]:
    """Run a command to its end. Returns the run's folder and configuration."""
    with tempfile.TemporaryDirectory() as scratch:
        file = settings
        if isinstance(settings, Mapping):
            file = Path(scratch) / "settings.yaml"
            file.write_text(yaml.safe_dump(nest_settings(settings, schema), allow_unicode=True), encoding="utf-8")
        words = [*(["--config", str(file)] if file is not None else []), *overrides]
        config = load_config(schema, name, words)
        folder = config.trainer.folder.absolute()
        object_words = objects.write(folder.with_name(f".{folder.name}.objects"))
        with_objects = load_config(schema, name, [*words, *object_words])
        _check_not_configured(config, object_words)
        run_to_end(f"alphaapollo.{find_module(name)}", [*words, *object_words], folder, on_iteration, show)
    return folder, with_objects


def nest_settings(settings: Mapping[str, Any], schema: type[BaseModel]) -> dict[str, Any]:
    """Convert `{"algorithm": "dapo", "env.seed": 1, "trainer": {"seed": 1}}` to nested YAML: presets become `defaults`.

    Names that users define, e.g. of `models`, may contain dots. Raises ConfigError for duplicates.
    """
    settings = json.loads(
        json.dumps(dict(settings), default=to_json_value)
    )  # paths to text, NumPy numbers to Python numbers
    groups = {path.name for path in find_shipped_configs().iterdir() if path.is_dir()}
    presets = [{key: value} for key, value in settings.items() if isinstance(value, str) and key in groups]
    values: dict[str, Any] = {"defaults": [*presets, "_self_"]} if presets else {}
    chosen = {key for preset in presets for key in preset}
    for key, value in settings.items():
        if key not in chosen:
            _set_value(values, key.split("."), value, list_map_keys(schema))
    return values


def _set_value(values: dict[str, Any], path: Sequence[str], value: Any, maps: Sequence[str]) -> None:
    *sections, last = path
    key, inside = ".".join(path), values
    for part in sections:
        inside = inside.setdefault(part, {})
        if not isinstance(inside, dict):
            raise ConfigError(f"{key}: {part} is also set to a value. Remove one of them.")
    if isinstance(value, dict):
        for name, inner in value.items():
            _set_value(values, [*path, *([name] if key in maps else name.split("."))], inner, maps)
    elif last in inside:
        raise ConfigError(f"{key} is set twice. Set it once.")
    else:
        inside[last] = value


def _check_not_configured(config: BaseModel, words: Sequence[str]) -> None:
    """Raise ConfigError if a key is set although the call has a Python object for it, except a preset's estimator."""
    known = list_keys(type(config))
    for key in (word.partition("=")[0] for word in words):
        if key != "algorithm.adv_estimator" and (value := get_value(config, key)) != known[key].default:
            raise ConfigError(
                f"{key}={format_value(value)}, but the call also has a Python object for it. Remove one of them."
            )
