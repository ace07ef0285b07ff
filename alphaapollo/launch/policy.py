"""Preparation of a policy's training: main_ppo, and loops of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import Config, Model, Teacher, TeacherModel
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.launch.plan import Plan, add_memory_plan, resolve_plan
from alphaapollo.launch.prepare import Preparation
from alphaapollo.models.load import load_config
from alphaapollo.planning.memory_fit import replace_values
from alphaapollo.planning.model_requirements import ModelUse
from alphaapollo.testing import try_user_functions
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.workers.builders import (
    make_critic_model_section,
    make_reward_model_section,
    make_teacher_model_sections,
)

OTHER_TOKENIZER = (
    "Use a teacher with the policy's tokenizer (e.g. a larger model of its family), or train on the teacher's texts "
    "(docs/sft.md)."
)


class PolicyPreparation(Preparation):
    """Checked inputs of a training with the keys of main_ppo."""

    config: Config
    plan: Plan

    @property
    def model(self) -> Model:
        return self.config.actor_rollout_ref.model

    def list_models(self) -> Iterator[ModelUse]:
        return list_model_uses(self.config)

    def check_config(self) -> None:
        super().check_config()
        if self.config.algorithm.custom_module:
            load_user_module(self.config.algorithm.custom_module, "algorithm.custom_module")
        algorithm, actor = self.config.algorithm, self.config.actor_rollout_ref.actor
        functions = get_estimator(algorithm.adv_estimator), get_policy_loss(actor.policy_loss.loss_mode)
        try_user_functions(*functions, algorithm, actor, self.config.group_size)

    def resolve_workers(self) -> None:
        self.plan = resolve_plan(self.config, self.machine, self.notices)

    def plan_memory(self) -> None:
        self.plan = add_memory_plan(self.plan, self.config, self.machine, self.notices)
        self.memory = self.plan.memory
        role = {"model": self.plan.model, "rollout": self.plan.rollout, "actor": self.plan.actor}
        chosen = {f"actor_rollout_ref.{name}": section for name, section in role.items()} | {"critic": self.plan.critic}
        self.chosen = replace_values(self.config, chosen)

    def check_teachers(self) -> None:
        teacher = self.config.teacher
        for key, model in teacher.local_models.items():
            self.notices += check_teacher_vocabulary(key, model, teacher, self.model, self.renderer)


def list_model_uses(config: Config) -> Iterator[ModelUse]:
    """Yield the models of a training run, and the settings that each of them must support."""
    role, actor = config.actor_rollout_ref, "actor_rollout_ref.actor"
    policy = ModelUse(
        "actor_rollout_ref.model.path",
        role.model,
        engine=role.rollout,
        engine_section="actor_rollout_ref.rollout",
        lengths=config.data,
        fsdp=role.actor.fsdp_config,
        fsdp_section=f"{actor}.fsdp_config",
        num_ranks=config.trainer.num_ranks,
        ulysses_size=role.actor.ulysses_sequence_parallel_size,
        ulysses_section=f"{actor}.",
        optimizer=role.actor.optim.name,
        self_teacher_length=config.max_teacher_length if config.teacher.uses_self_teacher else 0,
    )
    yield policy
    other_use = replace(
        policy, writes_text=False, engine=None, lengths=None, fsdp=None, optimizer="", self_teacher_length=0
    )
    if "values" in get_estimator(config.algorithm.adv_estimator).needs:
        model, fsdp = make_critic_model_section(role.model, config.critic), config.critic.fsdp_config
        critic = replace(other_use, key="critic.model.path", model=model, fsdp=fsdp, policy=role.model)
        yield replace(critic, fsdp_section="critic.fsdp_config")
    for key, model in make_teacher_model_sections(role.model, config.teacher).items():
        yield replace(other_use, key=f"{key}.path", model=model, policy=role.model)
    if config.reward_model.enable:
        scorer = make_reward_model_section(role.model, config.reward_model)
        yield replace(other_use, key="reward_model.model.path", model=scorer)


def check_teacher_vocabulary(
    key: str, model: TeacherModel, teacher: Teacher, policy: Model, policy_renderer: Renderer
) -> list[str]:
    """Check that a teacher on the ranks can read the policy's token ids. Returns notices; raises ValueError if not.

    Each token id must mean the same token in both models. To compare full distributions (all values of
    teacher.divergence except `sampled`), the teacher must also have no extra tokens, and at least as many logits.
    """
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    teacher_ids, policy_ids = tokenizer.get_vocab(), policy_renderer.tokenizer.get_vocab()
    path = f"{key}.path={model.path}"
    if differing := [token for token, number in policy_ids.items() if teacher_ids.get(token) != number]:
        raise ValueError(
            f"{path} lacks these tokens of the policy, or has them with another id: {_format_tokens(differing)}. "
            f"{OTHER_TOKENIZER}"
        )
    if teacher.uses_full_vocabulary:
        cause = f"teacher.divergence={teacher.divergence} compares full distributions"
        reader = Model(path=model.path, trust_remote_code=model.trust_remote_code)
        logits, needed = (int(load_config(section).get_text_config().vocab_size) for section in (reader, policy))
        if (extra := [token for token in teacher_ids if token not in policy_ids]) or logits < needed:
            raise ValueError(
                f"{cause}, but {path} has {logits} logits (the policy {needed}), and these tokens that the policy "
                f"lacks: {_format_tokens(extra) or 'none'}. Set teacher.divergence=sampled, or use another teacher."
            )
    if tokenizer.chat_template == policy_renderer.tokenizer.chat_template:
        return []
    return [f"{path} has another chat template than the policy. The teacher reads chats in the policy's template."]


def _format_tokens(tokens: list[str]) -> str:
    """Format the first three tokens and the total number, e.g. `'a', 'b', 'c', ... (23)`."""
    return ", ".join(map(repr, sorted(tokens)[:3])) + (f", ... ({len(tokens)})" if len(tokens) > 3 else "")
