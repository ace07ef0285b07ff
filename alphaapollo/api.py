"""Python API: `from alphaapollo import rl, sft, dpo, evaluate`.

run = rl({"algorithm": "grpo", "actor_rollout_ref.model.path": "model", ...}, "env.rollout.n=8", reward=score)
run.metrics, run.model, run.plot("critic/score/mean")

The configuration is a dict (dotted or nested keys) or a YAML file, followed by KEY=VALUE overrides as on the command
line. A run is a child process that ends with this process (run_process.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import Settings, format_settings, format_value, get_value
from alphaapollo.config.load import find_command_module, load_config
from alphaapollo.config.schema import Config, DpoConfig, GenerationConfig, InferenceConfig, SftConfig
from alphaapollo.results import Evaluation, TrainedRun
from alphaapollo.run_process import OnIteration, run_in_child_process
from alphaapollo.user_objects import write_objects

if TYPE_CHECKING:
    from alphaapollo.algorithms.advantages import Estimator

ConfigT = TypeVar("ConfigT", bound=Config | SftConfig | DpoConfig | InferenceConfig)


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
        environment: Class of environments/base.py, TRL, Gymnasium or SkyRL-Gym; `reward` may score its episodes.
        tools: Functions with types and a docstring, for an environment that calls tools.
        estimator: Advantage estimator `(inputs, config) -> Advantages`, or an `Estimator` that declares its needs.
        agent: Program `run(task, endpoint)` that calls the model over HTTP (docs/agents.md). With `reward`, the reward
            function grades the agent's last answer, and the reward that the program returns is added.
        on_iteration: Callback `on_iteration(step, metrics)` after each iteration; an exception in it ends the run.
        show: Whether to print the output of the run.

    Raises:
        ValueError: The configuration or the data is invalid; the run did not start.
        RunFailed: The run failed.
        KeyboardInterrupt: Ctrl-C. All processes have ended; the same call resumes from the newest checkpoint.
    """
    objects = {"reward": reward, "environment": environment, "tools": tools, "estimator": estimator, "agent": agent}
    return TrainedRun(*run_command(Config, "ppo", config, overrides, on_iteration, show, objects))


def sft(
    config: Settings = None, *overrides: str, on_iteration: OnIteration | None = None, show: bool = True
) -> TrainedRun:
    """Run supervised fine-tuning (main_sft). Arguments, result and errors as in `rl`, with the keys of main_sft."""
    return TrainedRun(*run_command(SftConfig, "sft", config, overrides, on_iteration, show))


def dpo(
    config: Settings = None, *overrides: str, on_iteration: OnIteration | None = None, show: bool = True
) -> TrainedRun:
    """Train on preferences (main_dpo). Arguments, result and errors as in `rl`, with the keys of main_dpo."""
    return TrainedRun(*run_command(DpoConfig, "dpo", config, overrides, on_iteration, show))


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
    return Evaluation(*run_command(GenerationConfig, "generation", config, overrides, None, show, objects))


def run_command(
    schema: type[ConfigT],
    config_name: str,
    settings: Settings,
    overrides: Sequence[str],
    on_iteration: OnIteration | None,
    show: bool,
    objects: Mapping[str, Any] = {},
) -> tuple[Path, ConfigT]:
    """Run a command in a child process and wait for its end. Returns the run folder and the configuration."""
    base = format_settings(settings, schema) if isinstance(settings, Mapping) else ["--config", str(settings)]
    words = [*overrides] if settings is None else [*base, *overrides]
    config = load_config(schema, config_name, words)
    folder = config.trainer.folder.absolute()
    object_overrides = write_objects(folder.with_name(f".{folder.name}.objects"), **objects)
    config_with_objects, defaults = load_config(schema, config_name, [*words, *object_overrides]), schema()
    for key in [override.partition("=")[0] for override in object_overrides]:
        if key != "algorithm.adv_estimator" and (value := get_value(config, key)) != get_value(defaults, key):
            problem = f"{key}={format_value(value)} is set, but the call also passes a Python object for it."
            raise ConfigError(f"{problem} Remove one of them.")
    module = find_command_module(schema, config_name)
    run_in_child_process(module, [*words, *object_overrides], folder, on_iteration, show)
    return folder, config_with_objects
