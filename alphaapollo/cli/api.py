"""The Python API: `from alphaapollo import rl, sft, dpo, evaluate, evolve`.

run = rl({"algorithm": "grpo", "actor_rollout_ref.model.path": "model", ...}, "env.rollout.n=8", reward=score)
run.metrics, run.model, run.plot("reward/mean")

A configuration is a dict (dotted or nested keys) or the path of a YAML file, then KEY=VALUE words, which win; all as on
the command line. The run is a process of its own, which ends with this one (follow.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel

from alphaapollo.cli.follow import OnIteration, run_to_end
from alphaapollo.cli.given import Given
from alphaapollo.cli.outcome import Evaluation, EvolvedRun, TrainedRun
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import accepted_keys, format_value, map_keys, value_of
from alphaapollo.config.load import load_config, module_of, shipped_configs
from alphaapollo.config.schema import Config, DpoConfig, EvolvingConfig, GenerationConfig, SftConfig

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
    """Train with reinforcement learning, to the last iteration; resumes as the command does.

    Args:
        config: the keys of main_ppo (docs/config.md).
        overrides: e.g. "algorithm=dapo", "trainer.seed=1".
        reward: a reward function, `(prompt, completion)` or `(prompt, trajectory)` (docs/rewards.md).
        environment: a class of the protocol in environments/base.py; with `reward` it is graded by that.
        tools: functions with types and a docstring, for an environment that calls tools.
        estimator: `(inputs, config) -> Advantages`, or an `Estimator` that says what it needs.
        on_iteration: called as `on_iteration(step, metrics)` after each iteration; what it raises ends the run.
        show: print what the run prints.

    Raises:
        ValueError: the run was refused before it began: what, got, fix.
        RunFailed: it failed.
        KeyboardInterrupt: Ctrl-C; nothing of the run is left, and the same call goes on from its newest checkpoint.
    """
    given = Given(reward, environment, tools, estimator)
    return TrainedRun(*_run("rl", Config, "ppo", config, overrides, given, on_iteration, show))


def sft(
    config: Settings = None, *overrides: str, on_iteration: OnIteration | None = None, show: bool = True
) -> TrainedRun:
    """Supervised fine-tuning, with the keys of main_sft. Arguments, results and errors as of `rl`."""
    return TrainedRun(*_run("sft", SftConfig, "sft", config, overrides, Given(), on_iteration, show))


def dpo(
    config: Settings = None, *overrides: str, on_iteration: OnIteration | None = None, show: bool = True
) -> TrainedRun:
    """Training on preferences, with the keys of main_dpo. Arguments, results and errors as of `rl`."""
    return TrainedRun(*_run("dpo", DpoConfig, "dpo", config, overrides, Given(), on_iteration, show))


def evaluate(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., Any] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    show: bool = True,
) -> Evaluation:
    """Sample and score, with the keys of main_generation. Arguments and errors as of `rl`."""
    given = Given(reward, environment, tools)
    return Evaluation(*_run("evaluate", GenerationConfig, "generation", config, overrides, given, None, show))


def evolve(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., Any] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    roles: Mapping[str, type[Role[Any]]] | None = None,
    on_round: OnIteration | None = None,
    show: bool = True,
) -> EvolvedRun:
    """Better answers without training, with the keys of evolving.main; goes on where an earlier call was ended.

    Args:
        roles: classes with `build` and `read` (docs/evolving.md) by the slot that they fill, e.g. `{"verifier": Mine}`.
        on_round: called as `on_round(number, figures)` after each round; what it raises ends the run.

    The other arguments and errors are as of `rl`.
    """
    given = Given(reward, environment, tools, roles=roles or {})
    return EvolvedRun(*_run("evolve", EvolvingConfig, "evolving", config, overrides, given, on_round, show))


def _run(
    program: str,
    schema: type[ConfigT],
    name: str,
    settings: Settings,
    overrides: Sequence[str],
    given: Given,
    on_iteration: OnIteration | None,
    show: bool,
) -> tuple[Path, ConfigT]:
    """To its end; the run's folder, and its configuration."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [*_words(settings, schema, Path(scratch)), *overrides]
        config = load_config(schema, name, words)
        folder = config.trainer.folder.absolute()
        objects = given.write(folder.with_name(f".{folder.name}.objects"), program)
        with_objects = load_config(schema, name, [*words, *objects])
        _check_free(config, objects)
        run_to_end(f"alphaapollo.{module_of(name)}", [*words, *objects], folder, on_iteration, show)
    return folder, with_objects


def _words(settings: Settings, schema: type[BaseModel], scratch: Path) -> list[str]:
    """As on the command line; a dict goes through a file there."""
    if settings is None:
        return []
    if isinstance(settings, str | Path):
        return ["--config", str(settings)]
    file = scratch / "settings.yaml"
    file.write_text(yaml.safe_dump(nested(settings, map_keys(schema)), allow_unicode=True), encoding="utf-8")
    return ["--config", str(file)]


def nested(settings: Mapping[str, Any], maps: Sequence[str] = ()) -> dict[str, Any]:
    """`{"algorithm": "dapo", "env.seed": 1, "trainer": {"seed": 1}}` as a YAML file has it: presets stand in its
    `defaults`, and the keys win over them. Names in the dict of one of `maps` are the user's, dots and all.

    ConfigError: a key that is given twice.
    """
    presets = [{key: value} for key, value in settings.items() if isinstance(value, str) and _is_group(key)]
    values: dict[str, Any] = {"defaults": [*presets, "_self_"]} if presets else {}
    chosen = {key for preset in presets for key in preset}
    for key, value in settings.items():
        if key not in chosen:
            _put(values, key.split("."), _plain(value), maps)
    return values


def _is_group(key: str) -> bool:
    return key.isidentifier() and (shipped_configs() / key).is_dir()


def _put(values: dict[str, Any], path: Sequence[str], value: Any, maps: Sequence[str]) -> None:
    *sections, last = path
    key, inside = ".".join(path), values
    for part in sections:
        inside = inside.setdefault(part, {})
        if not isinstance(inside, dict):
            raise ConfigError(f"{key}: {part} is given as a value, too. Write it once.")
    if isinstance(value, dict):
        for name, inner in value.items():
            _put(values, [*path, *([name] if key in maps else name.split("."))], inner, maps)
    elif last in inside:
        raise ConfigError(f"{key}: it is given twice. Write it once.")
    else:
        inside[last] = value


def _plain(value: Any) -> Any:
    """As YAML has it: paths as text, tuples as lists, numbers of NumPy as Python's."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def _check_free(config: BaseModel, objects: Sequence[str]) -> None:
    """ConfigError: the configuration names something for which a Python object is given, too. An estimator is free to
    come on top of a preset."""
    known = accepted_keys(type(config))
    for key in (one.partition("=")[0] for one in objects):
        if key != "algorithm.adv_estimator" and (said := value_of(config, key)) != known[key].default:
            raise ConfigError(f"{key}={format_value(said)}: a Python object is given for it, too. Leave one of them out.")
