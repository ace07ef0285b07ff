"""What a run is, and what may change when it goes on: model, algorithm, data and environment are its identity."""

from __future__ import annotations

from alphaapollo.config.changes import Judge, Verdict
from alphaapollo.config.schema import Config

IDENTITY = {
    "actor_rollout_ref.model.path": "another model",
    "critic.model.path": "another model",
    "algorithm.adv_estimator": "another algorithm",
    "data.train_files": "other data",
    "env.env_name": "another environment",
}


def judge_of(config: Config) -> Judge:
    """What becomes of a key that has changed since the run's earlier start."""
    kept = {"trainer.val_before_train": "the run has begun"}
    if config.algorithm.kl_ctrl.type != "fixed":
        kept["algorithm.kl_ctrl.kl_coef"] = "the controller goes on from the coefficient in the checkpoint"
    reordered = "the rest of the epoch comes in another order"

    def judge(key: str) -> tuple[Verdict, str]:
        if key in IDENTITY:
            return "refused", IDENTITY[key]
        if key in kept:
            return "kept", kept[key]
        return "applied", reordered if key in ("data.seed", "data.shuffle", "data.train_max_samples") else ""

    return judge
