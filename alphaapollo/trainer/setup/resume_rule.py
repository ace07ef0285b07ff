"""What may change when a run goes on, and what a run is: model, algorithm, data and environment are its identity.

launch/resume.py refuses by this rule; fine-tuning and generation have theirs beside their programs. What becomes of
each key stands in tests/unit/launch/change_rules.txt.
"""

from __future__ import annotations

from alphaapollo.config.diff import (
    ANOTHER_MODEL,
    LENGTH,
    NEW_DRAWS,
    OTHER_ADAPTERS,
    OTHER_DATA,
    OTHER_SELECTION,
    REORDERED,
    ROUNDING,
    SAME_NAME,
    ChangeRule,
    Verdict,
)
from alphaapollo.config.schema import Config
from alphaapollo.launch.cpu_threads import ENGINE, OTHER_ROUNDING, TRAINER

ROLE = "actor_rollout_ref"
IDENTITY = {
    f"{ROLE}.model.path": ANOTHER_MODEL,
    f"{ROLE}.model.tokenizer_path": "another tokenizer",
    "critic.model.path": ANOTHER_MODEL,
    **{
        f"{role}.model.{name}": OTHER_ADAPTERS
        for role in (ROLE, "critic")
        for name in ("lora_rank", "lora_alpha", "target_modules")
    },
    "algorithm.adv_estimator": "another algorithm",
    "algorithm.custom_module": SAME_NAME,
    f"{ROLE}.actor.policy_loss.loss_mode": "another algorithm",
    "data.train_files": OTHER_DATA,
    "data.prompt_key": OTHER_DATA,
    "env.env_name": "another environment",
    "env.custom_module": SAME_NAME,
    "env.verifiers.name": "another environment",
    "env.reasoning_gym.tasks": OTHER_DATA,
}
OF_ROUNDING = (
    *("trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device"),
    *(f"{ROLE}.model.{name}" for name in ("dtype", "attention", "use_torch_compile", "use_liger")),
    *(f"{ROLE}.actor.{name}" for name in ("ppo_max_token_len_per_gpu", "use_prefix_grouper", "fsdp_config.fsdp_size")),
    *("critic.fsdp_config.fsdp_size", "critic.ulysses_sequence_parallel_size"),
    f"{ROLE}.actor.ulysses_sequence_parallel_size",
    *(
        f"{ROLE}.rollout.{name}"
        for name in ("name", "dtype", "tensor_model_parallel_size", "num_engines", "max_num_seqs")
    ),
    *(
        f"{ROLE}.rollout.{name}"
        for name in ("max_num_batched_tokens", "block_size", "enforce_eager", "engine_kwargs.vllm")
    ),
    f"{ROLE}.rollout.enable_prefix_caching",
    f"{ROLE}.ref.log_probs_ahead",
)
OF_REWARDS = (
    *("custom_reward_function.path", "custom_reward_function.name"),
    *(f"reward.{name}" for name in ("components", "required", "custom_module", "judge.model", "judge.prompt")),
    *(f"reward_model.{name}" for name in ("enable", "weight", "max_length", "model.path")),
)
OF_TEACHING = ("teacher.divergence", "teacher.beta", "teacher.model.path")
OF_VALIDATION = (
    *("data.val_files", "data.val_max_samples"),
    *(f"{ROLE}.rollout.val_kwargs.{name}" for name in ("n", "temperature", "top_p", "top_k", "greedy")),
)
EFFECTS = {
    **dict.fromkeys(("data.seed", "data.shuffle", "data.train_max_samples"), REORDERED),
    **dict.fromkeys(("data.max_prompt_length", "data.truncation"), OTHER_SELECTION),
    **dict.fromkeys(("trainer.total_epochs", "trainer.total_training_steps"), LENGTH),
    **dict.fromkeys(OF_ROUNDING, ROUNDING),
    **dict.fromkeys((TRAINER, ENGINE), OTHER_ROUNDING),
    **dict.fromkeys(OF_REWARDS, "rewards before and after do not compare"),
    **dict.fromkeys(OF_TEACHING, "distances to the teacher before and after do not compare"),
    **dict.fromkeys(OF_VALIDATION, "validations before and after do not compare"),
    "trainer.seed": NEW_DRAWS,
}


def change_rule_of(config: Config) -> ChangeRule:
    """What becomes of a key that has changed since the run's earlier start."""
    kept = {"trainer.val_before_train": "the run has begun"}
    if config.algorithm.kl_ctrl.type != "fixed":
        kept["algorithm.kl_ctrl.kl_coef"] = "the controller goes on from the coefficient in the checkpoint"

    def change_rule(key: str) -> tuple[Verdict, str]:
        if key in IDENTITY:
            return "refused", IDENTITY[key]
        if key in kept:
            return "kept", kept[key]
        return "applied", EFFECTS.get(key, "")

    return change_rule
