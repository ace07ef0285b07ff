"""What may change when a run goes on, and what a run is: model, algorithm, data and environment are its identity.

startup/resume.py refuses by this rule; fine-tuning and generation have theirs beside their programs.
"""

from __future__ import annotations

from alphaapollo.config.changes import ChangeRule, Verdict
from alphaapollo.config.schema import Config
from alphaapollo.startup.threads import ENGINE, OTHER_ROUNDING, TRAINER

IDENTITY = {
    "actor_rollout_ref.model.path": "another model",
    "critic.model.path": "another model",
    **{
        f"{role}.model.{name}": "other adapters"
        for role in ("actor_rollout_ref", "critic")
        for name in ("lora_rank", "lora_alpha", "target_modules")
    },
    "algorithm.adv_estimator": "another algorithm",
    "data.train_files": "other data",
    "env.env_name": "another environment",
}
REORDERED = "the rest of the epoch comes in another order"
EFFECTS = {
    **dict.fromkeys(("data.seed", "data.shuffle", "data.train_max_samples"), REORDERED),
    **dict.fromkeys((TRAINER, ENGINE), OTHER_ROUNDING),
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
