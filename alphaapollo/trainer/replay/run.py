"""A recorded iteration's learning, computed again in this process: the same `learn`, on trainers alone.

recording + settings -> prepare (one rank, the run's choices) -> trainers as they were -> learn -> what came out
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from alphaapollo.algorithms.kl import make_kl_controller
from alphaapollo.config.keys import with_value
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.handles import CriticGroup, PolicyGroup
from alphaapollo.controller.local import launch_trainers
from alphaapollo.controller.placement import detect_machine
from alphaapollo.launch.failures import FAILURES
from alphaapollo.launch.input_checks import choose_kernels
from alphaapollo.models.float64_mode import Float64Mode
from alphaapollo.models.load import load_config
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.replay.record import find_machine_words, outcome_of
from alphaapollo.trainer.replay.recording import About, Outcome, Recording
from alphaapollo.trainer.run_state import Learner
from alphaapollo.trainer.setup.plan import Plan, resolve_plan
from alphaapollo.trainer.setup.roles import make_roles
from alphaapollo.trainer.step.learn import learn
from alphaapollo.utils.user_module import load_user_module

MODEL = "actor_rollout_ref.model"
CHOSEN = ("dtype", "attention", "enable_gradient_checkpointing")  # of the model, by the run's plan
SAME = (
    *("trainer.device", "trainer.cpu_threads", "algorithm.custom_module"),
    *(f"{MODEL}.path", "critic.model.path", "teacher.model.path"),
)
USED = (
    *(*SAME, f"{MODEL}.", "actor_rollout_ref.actor.", "algorithm.", "critic.", "teacher."),
    *("data.max_response_length", "trainer.on_bad_step", "trainer.critic_warmup"),
)
ELSEWHERE = ("algorithm.filter_groups.", "algorithm.reference_reset.", "actor_rollout_ref.actor.ulysses")


@dataclass(frozen=True)
class Prepared:
    """What is to be computed."""

    recording: Recording
    config: Config  # of one rank
    plan: Plan
    float64: bool
    changes: list[str]  # settings that are not the run's, and change what is computed
    reasons: list[str]  # why even with the same settings the bits may differ

    @property
    def exact(self) -> bool:
        """Bit for bit what the run computed is expected."""
        return not (self.float64 or self.changes or self.reasons)


def prepare(recording: Recording, config: Config, overrides: Sequence[str], float64: bool) -> Prepared:
    """`config`: the run's with the overrides. ValueError: one of them has no part in it, or the model is not there."""
    given = [word.partition("=")[0].lstrip("+~") for word in overrides]
    _check_used(given)
    about, machine = recording.about, detect_machine()
    wanted = config.trainer.device if "trainer.device" in given else about.device
    device: Device = "cuda" if wanted in ("cuda", "auto") and machine.num_gpus else "cpu"
    config = _one_rank(config, about, device, float64, given)
    if config.algorithm.custom_module:
        load_user_module(config.algorithm.custom_module, "algorithm.custom_module")
    plan = resolve_plan(config, machine, [])
    plan = replace(plan, reference_ahead=plan.needs_ref_columns and about.reference_ahead)
    load_config(plan.model)
    plan = replace(plan, model=choose_kernels(plan.model, config.actor_rollout_ref.model.use_liger))
    if float64:
        plan = replace(
            plan,
            model=plan.model.model_copy(
                update={
                    "dtype": "float64",
                    "use_torch_compile": False,
                    "use_liger": False,
                    "enable_gradient_checkpointing": False,
                }
            ),
        )
    changes = [word for word, key in zip(overrides, given, strict=True) if key not in SAME]
    return Prepared(recording, config, plan, float64, changes, list(_reasons(about, plan)))


async def replay(prepared: Prepared) -> Outcome:
    """Compute it; what learning itself ends with is an outcome, too."""
    recording, config, plan = prepared.recording, prepared.config, prepared.plan
    about = recording.about
    with Float64Mode() if prepared.float64 else nullcontext():
        roles = make_roles(config, plan, f"replay-{os.getpid()}", about.iterations, has_function=True)
        policy, critic = launch_trainers(plan.placement, roles)
        try:
            await policy.load(str(recording.folder / "policy"))
            if critic:
                await critic.load(str(recording.folder / "critic"))
            run = Learner(
                config=config,
                plan=plan,
                workers=_Trainers(policy, critic),
                estimator=plan.estimator,
                kl_controller=make_kl_controller(config.algorithm.kl_ctrl),
                progress=Progress(step=about.step - 1, kl_coef=about.kl_coef),
                console=Console(Terminal(quiet=True)),
                column_dtype="float64" if prepared.float64 else "float32",
                shares_prompts=about.shares_prompts and plan.shares_prompts,
            )
            run.begin_reference()
            try:
                learned = await learn(run, about.step, recording.groups, Timer())
            except FAILURES as error:
                return Outcome({}, {}, {}, str(error))
            return await outcome_of(run, about.step, learned)
        finally:
            await policy.close()
            if critic:
                await critic.close()


@dataclass
class _Trainers:
    policy: PolicyGroup
    critic: CriticGroup | None


def _check_used(keys: Iterable[str]) -> None:
    """The groups are there, and only one rank learns: other keys would be ignored in silence."""
    for key in keys:
        if not key.startswith(USED) or key.startswith(ELSEWHERE) or key.endswith(".fsdp_size"):
            raise ValueError(
                f"{key} has no part in what is replayed, the learning of one iteration on one rank. Give keys of "
                f"{', '.join(name.rstrip('.') for name in USED if name not in SAME)}; or {', '.join(SAME)}."
            )


def _one_rank(config: Config, about: About, device: Device, float64: bool, given: Sequence[str]) -> Config:
    """The run's choices, on one rank here and with no engine."""
    settings: dict[str, object] = {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.controller": "local",
        "trainer.device": device,
        "trainer.async_mode": None,
        "trainer.cpu_threads": about.threads,
        "reward_model.enable": False,
        "actor_rollout_ref.rollout.name": "fake",
        "actor_rollout_ref.rollout.num_engines": 1,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.data_parallel_size": 1,
        "actor_rollout_ref.rollout.lora": "merged",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.actor.fsdp_config.fsdp_size": -1,
        "critic.fsdp_config.fsdp_size": -1,
    } | {f"{MODEL}.{name}": about.model[name] for name in CHOSEN}
    if (device == "cpu" or float64) and about.model["attention"] not in ("padded", "sdpa"):
        settings[f"{MODEL}.attention"] = "padded" if device == "cpu" else "sdpa"
    for key, value in settings.items():
        if key not in given or key == "trainer.device":
            config = with_value(config, key, value)
    return config


def _reasons(about: About, plan: Plan) -> Iterable[str]:
    """Why the same computation may come out with other last bits."""
    place = plan.placement
    if about.ranks > 1:
        yield f"the run had {about.ranks} training ranks, whose sums have another order"
    if about.device != place.device:
        yield f"the run computed on {about.device}, this is {place.device}"
    elif place.device == "cuda":
        yield "kernels of a GPU may add up in any order"
    if about.threads != place.threads:
        yield f"the run had {about.threads} threads a rank, these are {place.threads}"
    for name, here in find_machine_words().items():
        if (there := about.machine.get(name)) != here:
            yield f"{name}: {there} there, {here} here"
