"""Methods on the real stack that are more than an algorithm of test_every_algorithm.py, one row each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.conftest import FinishedRun, files_with_secret
from tests.loop.replays import check_verified
from tests.loop.stack import Case, StackRunner, parametrize
from tests.mock_judge import MockJudge
from tests.page_commands import HAS_PLUGINS

TRACKERS = ",tensorboard,wandb" * HAS_PLUGINS
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


def check_critic(done: FinishedRun) -> None:
    first, second, third = done.metrics[1:]
    assert first["critic/grad_norm"] > 0
    assert "actor/grad_norm" not in first  # warming up
    assert second["actor/grad_norm"] > 0
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in (first, second, third)]
    assert coefficients[0] == coefficients[1] != coefficients[2]
    check_verified(done, 1)
    check_verified(done, 3)


def check_refilled_batches(done: FinishedRun) -> None:
    for line in done.metrics[1:]:
        rounds = line["rollout/rounds"]
        assert 1 <= rounds <= 3 and (line["rollout/groups_kept"] == 4 or rounds == 3)


def check_mismatch(done: FinishedRun) -> None:
    """The mismatch of an engine in bfloat16 is measured and corrected."""
    last = done.metrics[-1]
    assert 5e-5 < last["sync/probe_gap"] < 0.1
    assert last["mismatch/k3"] > 1e-8 and last["mismatch/rho_p01"] < 1.0 < last["mismatch/rho_p99"]
    assert 0.9 < last["actor/correction_weight"] < 1.0  # rho is cut at 1
    assert last["actor/grad_norm"] > 0


def check_trackers(done: FinishedRun) -> None:
    assert done.metrics[-1]["actor/grad_norm"] > 0
    assert done.metrics[-1]["sync/probe_gap"] < 0.1
    assert list(done.folder.glob("tensorboard/events.*")) or not HAS_PLUGINS
    assert list(done.folder.glob("wandb/offline-run-*")) or not HAS_PLUGINS
    assert files_with_secret(done) == []
    check_verified(done, 2, {"advantages"})


def check_trust_region(done: FinishedRun) -> None:
    """TRPO steps on selected samples, and the log-probs of the hf engine."""
    for line in (lines := done.metrics[1:]):
        assert line["batch/trajectories"] <= 8 and line["batch/lost"] == 0.0
        assert line["actor/optimizer_steps"] == 1.0
        assert 0 < line["trpo/kl"] <= 0.01 or line["trpo/rejected"] == 1.0
        assert line["sync/probe_gap"] < 5e-5
        assert {abs(line[f"sampling/{name}"]) < 5 for name in ("z", "repetition_z", "run_z", "run_repetition_z")} == {
            True
        }
    assert any(line["trpo/improvement"] > 0 for line in lines)


OWN_ESTIMATOR = '''
from alphaapollo.algorithms.advantages import register_estimator
from alphaapollo.algorithms.advantages.base import from_scores

@register_estimator("centred", group=True)
def centred(inputs, config):
    """The reward minus its mean over the batch."""
    return from_scores(inputs, lambda scores, groups: scores - scores.mean())
'''


def write_estimator(folder: Path) -> None:
    (folder / "own.py").write_text(OWN_ESTIMATOR)


CRITIC = (
    *("algorithm.adv_estimator=gae", "env.rollout.n=1", "data.train_batch_size=16", "trainer.critic_warmup=1"),
    *("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "trainer.total_training_steps=3"),
    "trainer.record_steps=[1,3]",
)
DAPO = ("algorithm=dapo", "algorithm.filter_groups.max_num_gen_batches=3", "data.max_response_length=4")
BFLOAT16_ENGINE = (
    *("algorithm=tis", "algorithm.rollout_correction.high=1.0", "env.rollout.n=4"),
    f"{ROLLOUT}.dtype=bfloat16",
)
BFLOAT16 = (
    *("algorithm.custom_module=FOLDER/own.py", "algorithm.adv_estimator=centred", f"{MODEL}.dtype=bfloat16"),
    "trainer.record_steps=[2]",
    *(f"{MODEL}.enable_gradient_checkpointing=selective", f"{MODEL}.activation_offload=True"),
    f"trainer.logger=[console{TRACKERS}]",
)
TRPO = (
    *("algorithm=trpo", "env.rollout.n=4", f"{ACTOR}.optim.cg_steps=3", f"{ROLLOUT}.name=hf", "data.val_files="),
    *("algorithm.filtration.method=max_variance", "algorithm.filtration.size=2", "algorithm.filtration.baseline=all"),
    *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.mode=reweight"),
    "algorithm.filter_groups.metric=reward",
)
CASES = {
    "critic_with_warmup": Case(check_critic, CRITIC, core=True),
    "dapo_refills": Case(check_refilled_batches, DAPO, core=True),
    "bfloat16_engine": Case(check_mismatch, BFLOAT16_ENGINE),
    "bfloat16_checkpointing_trackers": Case(check_trackers, BFLOAT16, write_estimator),
    "trust_region": Case(check_trust_region, TRPO),
}


@parametrize(CASES)
def test_method(stack: StackRunner, case: Case) -> None:
    case.run(stack)


def judge_digits(content: str) -> str:
    """Reply of a judge about the criterion `digits`."""
    answer = content.partition("<answer>\n")[2].rpartition("\n</answer>\n\n<criteria>")[0]
    return f'It is so: {{"digits": {int(any(map(str.isdigit, answer)))}}}'


def test_rloo_with_two_epochs_full_kl_and_a_rubric(stack: StackRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with MockJudge(judge_digits).serve() as judge:
        done = stack.run(
            *("algorithm.adv_estimator=rloo", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.use_kl_loss=True"),
            *(f"{ACTOR}.kl_loss_type=full", "reward.judge.model=mock", f"reward.judge.base_url={judge.url}"),
            "reward.rubric.criteria={digits: {text: The answer has digits}}",
            *("reward.components={rubric: 0.5}", "trainer.record_steps=[2]"),
        )
    check_verified(done, 2)
    last = done.metrics[-1]
    assert last["actor/grad_norm"] > 0 and last["actor/ref_kl"] > 0
    assert last["judge/judgements"] == last["rollout/trajectories"] == 16 and last["outcome/failed"] == 0
    assert 0 <= last["judge/cache_hit_rate"] < 1 and last["judge/seconds"] > 0
    for record in done.rollouts(2):
        parts, text = record["components"], record["turns"][-1]["text"].rpartition("</think>")[2]
        assert parts["rubric"] == parts["rubric/digits"] == any(map(str.isdigit, text))
        assert record["reward"] == pytest.approx(parts["task"] + 0.5 * parts["rubric"])
