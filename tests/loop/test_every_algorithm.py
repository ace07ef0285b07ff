"""Every recipe, estimator and loss trains on the real stack: finite metrics and a non-zero gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import yaml

from alphaapollo.algorithms.advantages import estimator_names
from alphaapollo.algorithms.policy_losses import policy_loss_names
from alphaapollo.config.keys import flatten_maps
from alphaapollo.config.load import find_shipped_config_folder
from examples.quickstart.make_task import make_model, make_tokenizer
from tests.loop.conftest import Task
from tests.loop.replays import check_verified
from tests.loop.stack import StackRunner

ALONE = ("gae", "turn_gae", "reinforce", "remax", "reinforce_plus_plus", "none")  # estimators without groups
ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
TEACHER = "teacher.model.path=TEACHER"  # the teacher's folder
LONGER_PROMPTS = "teacher.self_teacher.max_prompt_length=256"  # the tokenizer has one token per byte
EXTRA = {  # in addition to a recipe or an estimator
    "distill": [TEACHER],
    "mopd": [TEACHER],
    "grpo_passk_analytic": [
        "algorithm.passk_k=2",  # of groups of 4
        "custom_reward_function.name=compute_solved",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",  # one step: of two groups, none may have a gradient
    ],
    "pods": ["algorithm.filtration.size=2"],
    "magistral": ["reward.components={}", "reward.required=[]"],
    "prorl": ["algorithm.reference_reset.every=1", "algorithm.reference_reset.patience=null"],
    "gdpo": ["algorithm.gdpo_rewards=[accuracy,length]"],
    "sapo": ["actor_rollout_ref.model.attention=padded"],
    "cispo": ["actor_rollout_ref.actor.optim.name=muon"],
    "trpo": ["actor_rollout_ref.actor.optim.cg_steps=3"],
    "sdft": [LONGER_PROMPTS],
    "sdpo": [LONGER_PROMPTS],
    "reference_kl_dual": ["algorithm.kl_ctrl.kl_coef=0.1"],
}


def list_cases() -> Iterator[tuple[str, list[str]]]:
    """Names and overrides: each recipe of configs/algorithm, each estimator and each loss that no recipe uses, and
    teacher divergences with and without a reward."""
    files = sorted((find_shipped_config_folder() / "algorithm").glob("*.yaml"))
    recipes = {file.stem: flatten_maps(yaml.safe_load(file.read_text())) for file in files}
    for name, recipe in recipes.items():
        is_alone = recipe[ESTIMATOR] in ALONE and "env.rollout.n" not in recipe
        yield name, [f"algorithm={name}", *EXTRA.get(name, []), *make_group(is_alone)]
    for name in sorted({*estimator_names()} - {recipe[ESTIMATOR] for recipe in recipes.values()}):
        yield f"adv_estimator={name}", [f"{ESTIMATOR}={name}", *make_group(name in ALONE)]
    for name in sorted({*policy_loss_names()} - {recipe.get(LOSS, "ppo") for recipe in recipes.values()}):
        yield f"loss_mode={name}", [f"{ESTIMATOR}=grpo", f"{LOSS}={name}", *make_group(False)]
    for name, estimator in (("sampled", "none"), ("jsd", "none"), ("forward", "grpo")):
        taught = [f"{ESTIMATOR}={estimator}", f"teacher.divergence={name}", TEACHER]
        yield f"divergence={name}", [*taught, *make_group(estimator in ALONE)]


def make_group(is_alone: bool) -> list[str]:
    """16 trajectories per iteration."""
    return [f"data.train_batch_size={16 if is_alone else 4}", f"env.rollout.n={1 if is_alone else 4}"]


CASES = dict(list_cases())
REWARD = '''
def compute_solved(prompt, completion):
    """Reward an odd number of digits, about half of an untrained model's completions."""
    is_odd = float(sum(letter.isdigit() for letter in completion) % 2)
    return {"reward": is_odd, "accuracy": is_odd, "length": len(completion) / 100}

def compute_score(prompt, completion):
    """The rewards of two texts differ: a step whose groups have equal rewards would have no gradient to verify."""
    found = compute_solved(prompt, completion)
    return found | {"reward": found["reward"] + sum(map(ord, completion)) % 1000 / 1000}
'''


class AlgorithmRunner(StackRunner):
    """Runs two iterations of two optimizer steps."""

    def sizes(self, name: str) -> dict[str, Any]:
        sizes = super().sizes(name) | {
            "data.train_files": self.out / "train.parquet",
            "data.val_files": "",
            "trainer.save_freq": -1,
            "trainer.export_hf": False,
            "trainer.record_steps": [2],
        }
        return {key: value for key, value in sizes.items() if key != ESTIMATOR}


@pytest.fixture(scope="module")
def runner(task: Task, tmp_path_factory: pytest.TempPathFactory) -> AlgorithmRunner:
    runner = AlgorithmRunner(task, tmp_path_factory.mktemp("algorithms"))
    runner.reward.write_text(REWARD)
    rows = pd.read_parquet(task.data / "train.parquet")
    rows["extra_info"] = [info | {"length_budget": 8, "demonstration": "7"} for info in rows["extra_info"]]
    rows.to_parquet(runner.out / "train.parquet")
    make_tokenizer(runner.out / "teacher")
    make_model(runner.out / "teacher", seed=1)
    return runner


ALWAYS = {
    *("actor/loss", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "critic/score/mean"),
    *("critic/rewards/mean", "sync/probe_gap"),
}
WITH_CRITIC = {"ppo", "pf_ppo", "ppo_kl", "reference_kl_dual", "turn_ppo"}
CORRECTED = {"tis", "icepop", "mis", "mopd"}
ENGINE_LOGPROBS = {"bypass", "deepseek_v32", "dppo", "loss_mode=dppo_kl", "vespo"}
TAUGHT = {"distill", "mopd", "divergence=sampled", "divergence=jsd", "divergence=forward"}
SELF_TAUGHT = {"sdft": 0.99, "sdpo": 0.2}  # lower bound of the share of rows with a context of the teacher
TAUGHT_ALONE = {"distill", "divergence=jsd", *SELF_TAUGHT}  # by whole distributions only: there are no advantages


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_algorithm_trains(runner: AlgorithmRunner, name: str) -> None:
    words = [word.replace("TEACHER", str(runner.out / "teacher")) for word in CASES[name]]
    done = runner.run(*words, name=name.replace("=", "_"))
    lines = done.metrics[1:]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line.keys() >= ALWAYS
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["actor/grad_norm"] > 0 and line["sync/probe_gap"] < 5e-5
        assert ("critic/grad_norm" in line) == (name in WITH_CRITIC)
        assert ("critic/advantages/abs_mean" in line) == (name not in TAUGHT_ALONE)
        assert ("mismatch/k3" in line) == (name not in ENGINE_LOGPROBS)
        assert ("actor/correction_weight" in line) == (name in CORRECTED)
        assert ("actor/off_policy_masked" in line) == (name == "deepseek_v32")
        assert ("baseline/mean" in line) == (name == "remax")
        if name in TAUGHT:
            assert line["distill/reverse_kl"] > 0 and 0 < line["distill/agreement"] <= 1
        if name in SELF_TAUGHT:
            assert line["distill/rows_with_context"] > SELF_TAUGHT[name] and line["distill/divergence"] > 0
    first, second = lines
    check_verified(done, 2)
    if name == "prorl":
        assert [line["reference/resets"] for line in lines] == [1, 2]
        assert first["actor/ref_kl"] != second["actor/ref_kl"]
    if name == "reference_kl_dual":
        step = 0.01 * (first["actor/reward_kl_penalty_per_sequence"] - 6.0)
        assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(max(0.0, 0.1 + step))


@pytest.mark.core
def test_recipes_estimators_and_losses_are_cases() -> None:
    assert {"grpo", "dapo", "prorl", "remax", "gdpo", "loss_mode=gspo_token"} <= CASES.keys()
