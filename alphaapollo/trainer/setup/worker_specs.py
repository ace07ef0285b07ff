"""Describe how to build the workers of a run, and the probe of its weight syncs, from its configuration and plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.resolve import get_resolved
from alphaapollo.config.schema import ActorRolloutRef, Config, CustomRewardFunction
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.data.images import make_example_image
from alphaapollo.data.rendering import Renderer
from alphaapollo.rewards import zero_reward
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.trainer.setup.plan import Plan
from alphaapollo.trainer.step.reward_model_scorer import make_reward_model_settings
from alphaapollo.types import ImageInput, Message
from alphaapollo.weight_sync.transport import Transport, choose_transport
from alphaapollo.weight_sync.verification import Probe
from alphaapollo.workers.builders import build_policy_worker, make_critic_model_section, make_teacher_model_sections
from alphaapollo.workers.critic import CriticWorker, RewardModelWorker
from alphaapollo.workers.policy import PolicyWorkerConfig


def make_worker_specs(
    config: Config, plan: Plan, run_id: str, total_iterations: int, has_reward_function: bool
) -> WorkerSpecs:
    """Describe how to build the training ranks and the rollout workers of a run.

    total_iterations: for learning rate schedules. has_reward_function: also True if the environment gives the reward.
    """
    placement = plan.placement
    role = config.actor_rollout_ref.model_copy(update={"model": plan.model, "rollout": plan.rollout})
    is_vllm_on_ray = role.rollout.name == "vllm" and config.trainer.controller == "ray"
    serves_adapters = role.rollout.lora == "adapter"
    transport = Transport(
        kind=choose_transport(placement.device, placement.colocate, is_vllm_on_ray, serves_adapters),
        dtype=role.rollout.dtype,
        shared_folder=f"/dev/shm/alphaapollo-{run_id}",
        num_engine_ranks=placement.num_engines * placement.tensor_parallel,
    )
    custom_reward = config.custom_reward_function
    if not has_reward_function:
        custom_reward = CustomRewardFunction(path=zero_reward.__file__, name=zero_reward.zero_reward.__name__)
    groups = config.algorithm.filter_groups
    engines = RolloutWorkerConfig(
        model=role.model,
        rollout=role.rollout,
        env=config.env,
        data=config.data,
        reward=config.reward,
        custom_reward=custom_reward,
        device=placement.device,
        self_teacher=config.teacher.self_teacher if config.teacher.uses_self_teacher else None,
        run_dir=str(config.trainer.folder.resolve()),
        transport=transport.kind,
        shared_memory=transport.shared_folder,
        serves_suites=bool(config.trainer.val_suites),
        max_steps=total_iterations,
        needs_components="components" in get_estimator(config.algorithm.adv_estimator).needs
        or (groups.enable and groups.metric not in ("accuracy", "reward")),
    )
    return WorkerSpecs(
        placement=placement,
        run_id=run_id,
        rank_builders=_make_rank_builders(config, plan, role, transport, total_iterations),
        engine_builder=partial(RolloutWorker, engines),
        samples_in_flight=2 * get_resolved(role.rollout.max_num_seqs),
        cleanup_folders=[transport.shared_folder],
    )


def _make_rank_builders(
    config: Config, plan: Plan, section: ActorRolloutRef, transport: Transport, total_iterations: int
) -> dict[str, Callable[..., object]]:
    """Return the functions that build the workers of one training rank: policy, and critic and reward model if used."""
    policy = PolicyWorkerConfig(
        model=section.model,
        actor=section.actor,
        ref=section.ref,
        needs_reference=config.needs_reference,
        optimizer_steps=config.count_policy_optimizer_steps(total_iterations),
        temperature=section.rollout.temperature,
        correction=config.algorithm.rollout_correction,
        seed=config.trainer.seed,
        engine_lora_form=section.rollout.lora,
        saves_in_background=plan.saves_in_background,
        teacher=config.teacher,
        teacher_models=make_teacher_model_sections(section.model, config.teacher),
    )
    build = partial(build_policy_worker, policy, transport, config.algorithm.custom_module)
    builders: dict[str, Callable[..., object]] = {"policy": build}
    if plan.placement.has_critic:
        builders["critic"] = partial(
            CriticWorker,
            make_critic_model_section(section.model, config.critic),
            config.critic,
            optimizer_steps=config.count_critic_optimizer_steps(total_iterations),
            seed=config.trainer.seed,
            saves_in_background=plan.saves_in_background,
        )
    if plan.placement.has_reward_model:
        scorer = make_reward_model_settings(config.reward_model, plan.model)
        builders["reward model"] = partial(RewardModelWorker, scorer, config.reward_model.model.fsdp_config)
    return builders


PROBE_TOKENS = 64


def make_probe(renderer: Renderer, content: list[Message] | str, max_tokens: int) -> Probe:
    """Make a probe of at most `max_tokens` tokens: a generated image if the model has vision, and the start of the
    text of a prompt. The image comes first, so that the log-probs of the text depend on it."""
    text = renderer.encode_prompt(content)
    images: tuple[ImageInput, ...] = ()
    if renderer.images is not None:
        text = [token for token in text if token != renderer.images.placeholder_id]
        image = renderer.images.prepare(make_example_image())
        images = (image,) * (len(image.token_ids) < max_tokens)  # if it does not fit, prompts have no images either
    token_ids = [token for image in images for token in image.token_ids]
    length = min(PROBE_TOKENS, max_tokens - len(token_ids))
    return Probe(token_ids + (text * PROBE_TOKENS)[:length], images)  # a prompt may be a single token
