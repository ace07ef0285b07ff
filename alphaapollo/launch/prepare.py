"""What a command decides and checks before it starts a worker: one list of steps for all commands.

A command is a subclass of `Preparation`. It overrides the steps that it does in another way. LEFT_OUT names the steps
that it does not need, with the reason (docs/architecture.md has the table).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.load import NO_USER_SETTINGS, UserSettings
from alphaapollo.config.schema import Model
from alphaapollo.controller.placement import Machine, make_planned_machine
from alphaapollo.data.findings import DataFinding
from alphaapollo.data.rendering import Renderer
from alphaapollo.environments.base import EnvironmentSpec
from alphaapollo.launch.inputs import (
    check_rewards,
    collect_environment_notices,
    detect_node_resources,
    explain_missing_cluster,
    find_environment_spec,
    make_renderer,
)
from alphaapollo.models.load import list_template_notices
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import check_trackers
from alphaapollo.planning.memory_plan import MemoryPlan
from alphaapollo.planning.model_requirements import ModelUse, check_models
from alphaapollo.planning.plan_table import describe_chosen_keys, describe_planned_device, print_plan_table
from alphaapollo.planning.template import fix_template_date
from alphaapollo.planning.threads import choose_cpu_threads
from alphaapollo.planning.trials import try_environment
from alphaapollo.runs.resume import StartPoint, find_start_point
from alphaapollo.runs.run_plan import RunPlan
from alphaapollo.types import Prompt


class Preparation:
    """Checked inputs of a run whose workers are not started. Each step sets attributes that later steps and the run
    read, and adds to `notices`. A step raises ValueError for input that cannot be used."""

    STEPS: ClassVar[Sequence[str]] = (
        "find_machine",
        "fix_template_date",
        "choose_cpu_threads",
        "check_config",
        "load_environment",
        "resolve_workers",
        "check_trackers",
        "find_start",
        "check_models",
        "make_renderer",
        "read_data",
        "check_teachers",
        "check_template",
        "try_rewards",
        "try_environment",
        "plan_memory",
        "show_plan",
    )
    LEFT_OUT: ClassVar[Mapping[str, str]] = {}
    """Step -> why the command does without it."""
    OPTIONAL_PATHS: ClassVar[frozenset[str]] = frozenset()
    """Keys of required paths that the command does not need."""

    config: Any  # of the command; steps replace it
    chosen: Any = None  # config of a training, with the values that the run chooses for `auto`
    machine: Machine  # a node of the run
    environment: EnvironmentSpec
    start: StartPoint  # from scratch, or a checkpoint
    renderer: Renderer  # of prompts, as the rollout workers render them
    memory: MemoryPlan | None = None  # of one device; None: unknown

    def __init__(self, config: Any, console: Console, user_settings: UserSettings = NO_USER_SETTINGS):
        self.config, self.console, self.user_settings = config, console, user_settings
        self.notices: list[str] = []
        self.findings: list[DataFinding] = []

    @classmethod
    def list_steps(cls) -> Iterator[str]:
        """Yield the names of the command's steps in their order."""
        return (name for name in cls.STEPS if name not in cls.LEFT_OUT)

    def prepare(self) -> Self:
        """Run all steps of the command."""
        for name in self.list_steps():
            getattr(self, name)()
        return self

    def describe(self) -> RunPlan:
        """Describe the run for the table that is printed, and for plan.json."""
        raise NotImplementedError

    @property
    def model(self) -> Model:
        """The model whose chat template renders the prompts."""
        model: Model = self.config.model
        return model

    @property
    def all_notices(self) -> list[str]:
        """Notices of all steps, and how the run starts."""
        return [*self.notices, *self.start.describe()]

    def list_models(self) -> Iterable[ModelUse]:
        """Yield the models of the run, and the settings that each must support."""
        raise NotImplementedError

    def list_graded_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to try the reward function with. The environment is tried with the first one."""
        raise NotImplementedError

    def find_machine(self) -> None:
        """Find cores, memory and GPUs of this machine, of a node of the Ray cluster that RAY_ADDRESS names, or of the
        node that a dry run plans for."""
        if getattr(self.config.trainer, "planned_device", ""):
            self.machine = make_planned_machine(self.config)
            return
        self.machine = detect_node_resources(self.config)
        self.notices += filter(None, [explain_missing_cluster(self.config)])

    def fix_template_date(self) -> None:
        """Fix the day that the chat template writes."""
        self.config = fix_template_date(self.config, self.model)

    def choose_cpu_threads(self) -> None:
        """Choose numbers of CPU threads, or keep those of the run to resume."""
        self.config, notices = choose_cpu_threads(self.config, self.machine)
        self.notices += notices

    def check_config(self) -> None:
        """Check paths and combinations of keys, also against the machine."""
        size, keys = (self.machine.num_gpus, self.machine.num_cores), self.user_settings.keys
        self.notices += check_config_and_get_notices(self.config, *size, keys, optional_paths=self.OPTIONAL_PATHS)
        self.notices += self.user_settings.notices

    def load_environment(self) -> None:
        """Import the environment, and check its settings."""
        self.environment = find_environment_spec(self.config.env)
        self.notices += collect_environment_notices(self.config, self.environment)

    def resolve_workers(self) -> None:
        """Replace `auto` values, and place the workers."""
        raise NotImplementedError

    def check_trackers(self) -> None:
        """Check that the packages and accounts of trackers are there."""
        check_trackers(self.config.trainer.logger)

    def find_start(self) -> None:
        """Find the checkpoint to resume from."""
        self.start = find_start_point(self.config)

    def check_models(self) -> None:
        """Check that each model supports its settings."""
        self.notices += check_models(self.list_models())

    def make_renderer(self) -> None:
        """Load the tokenizer, and check that the template shows what the environment writes."""
        self.renderer = make_renderer(self.config.env, self.model, self.config.data.apply_chat_template_kwargs)

    def read_data(self) -> None:
        """Read prompts or examples."""
        raise NotImplementedError

    def check_teachers(self) -> None:
        """Check that teachers can read the policy's tokens."""
        raise NotImplementedError

    def check_template(self) -> None:
        """Add notices about the chat template."""
        arguments = self.config.data.apply_chat_template_kwargs
        self.notices += list_template_notices(self.model, self.renderer, arguments)

    def try_rewards(self) -> None:
        """Try the reward function on some prompts."""
        is_graded, custom = self.environment.is_graded(self.config.env), self.config.custom_reward_function
        notices, _ = check_rewards(self.list_graded_prompts(), self.config.reward, custom, is_graded)
        self.notices += notices

    def try_environment(self) -> None:
        """Reset the environment for a prompt."""
        self.notices += try_environment(self.config.env, self.list_graded_prompts()[:1])

    def plan_memory(self) -> None:
        """Estimate the memory of a device, and choose what depends on it."""
        raise NotImplementedError

    def show_plan(self) -> None:
        """Print the plan. Raises ValueError if the run does not fit into memory."""
        memory, trainer = self.memory, self.config.trainer
        shows_memory = trainer.dry_run or (memory is not None and bool(memory.problem or memory.warning))
        plan = self.describe()
        if trainer.dry_run and self.chosen:
            device, chosen_keys = describe_planned_device(trainer), describe_chosen_keys(self.config, self.chosen)
            plan = replace(plan, settings=device | plan.settings | chosen_keys)
        print_plan_table(trainer.folder, plan, self.console, shows_memory)
        if memory and memory.problem:
            raise ValueError(memory.problem)
