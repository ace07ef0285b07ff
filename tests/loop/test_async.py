"""Asynchronous training: equal to the synchronous run without staleness, and with staleness on the real engine."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence

import pytest

from tests.loop.conftest import FinishedRun, Runner, wait_until_nothing_is_left
from tests.loop.engine_kit import needs_sglang

LOCAL = "trainer.controller=local"
CORRECTED = "algorithm.rollout_correction.method=tis"
CARRY, SEPARATE = "trainer.async_mode=carry", "trainer.async_mode=separate"


def exported_weights(done: FinishedRun) -> bytes:
    return (done.folder / "model/model.safetensors").read_bytes()


def check_counts(lines: Sequence[dict[str, float]]) -> None:
    """Check that every started group is trained on, dropped or carried, also over resumes."""
    carried = 0.0
    for line in lines:
        gone = sum(line[f"async/{name}"] for name in ("trained", "dropped_failed", "dropped_no_signal"))
        assert carried + line["async/started"] == gone + line["async/carried"]
        carried = line["async/carried"]


def test_zero_staleness_equals_synchronous_run(ppo: Runner) -> None:
    """Bitwise, with a curriculum, reused groups, dynamic sampling, validations, reference resets and a resume."""
    settings = (
        *(LOCAL, "actor_rollout_ref.rollout.name=fake", "trainer.save_freq=2", "trainer.test_freq=2", CORRECTED),
        *("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"),
        *("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.reference_reset.every=2"),
        *("data.sampler=frontier", "data.curriculum.revisit_rate=0.01", "data.reuse.groups=2"),
    )
    none = ("trainer.max_staleness=0",)
    sync = ppo.run(*settings, "trainer.total_training_steps=4", name="sync")
    carry = ppo.run(*settings, CARRY, *none, "trainer.total_training_steps=4", name="carry")
    ppo.run(*settings, SEPARATE, *none, "trainer.total_training_steps=2", name="separate")
    separate = ppo.run(*settings, SEPARATE, *none, "trainer.total_training_steps=4", name="separate")
    assert "resumed from" in separate.output
    for done in (carry, separate):
        assert exported_weights(done) == exported_weights(sync)
        for one, other in zip(sync.metrics[1:], done.metrics[1:], strict=True):
            names = ("actor/loss", "actor/grad_norm", "critic/score/mean", "data/prompts_consumed", "val/accuracy")
            for name in (*names, "curriculum/observed", "curriculum/pass_rate", "reuse/groups", "reuse/age"):
                assert one.get(name) == other.get(name), (one["step"], name)
        assert done.metrics[-1]["reuse/groups"] > 0


@pytest.mark.parametrize(
    ("mode", "engine"), [(CARRY, "vllm"), (SEPARATE, "vllm"), pytest.param(CARRY, "sglang", marks=needs_sglang)]
)
def test_async_run_resumes_after_kill(ppo: Runner, mode: str, engine: str) -> None:
    """Killed on Ray, where generation runs during the update, and resumed in one process."""
    settings = (
        f"actor_rollout_ref.rollout.name={engine}",
        *(mode, CORRECTED, "trainer.max_staleness=2", "trainer.save_freq=3", "trainer.test_freq=3"),
        *("data.max_response_length=48", "actor_rollout_ref.rollout.max_num_seqs=24", "trainer.total_training_steps=6"),
        ppo.hold("learn", step=5),
    )
    killed = ppo.start(*settings)
    progress = ppo.out / "test/run/checkpoints/step_000003/progress.json"
    while not progress.exists():
        assert killed.wait(0.05) is None, killed.printed
    killed.signal(signal.SIGKILL)
    (ppo.out / "release").touch()
    saved = json.loads(progress.read_text())
    assert saved["unfinished"]
    wait_until_nothing_is_left(ppo)
    done = ppo.run(LOCAL, *settings)
    assert "resumed from" in done.output
    lines = done.metrics[1:]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    check_counts(lines)
    assert lines[2]["async/carried"] == len(saved["unfinished"])
    assert lines[-1]["async/carried"] == 0  # the last iteration starts no group that is not used
    assert 0 < max(line["staleness/max"] for line in lines) <= 2
    if mode == CARRY:  # with separate, all requests may end before the next weights arrive
        assert max(line["staleness/mixed"] for line in lines) > 0
    for line in lines:
        assert line["sync/probe_gap"] < 5e-5 and line["actor/grad_norm"] > 0
        assert line["async/trained"] == 4 and line["rollout/trajectories"] == 16
    records = [record for line in lines for record in done.rollouts(int(line["step"]))]
    used = [(record["prompt_id"], record["sample"]) for record in records]
    assert len(used) == len(set(used)) == 6 * 16  # one pass over 64 prompts: each is used once
    for record in records:
        (row,) = record["rows"]
        versions = [version for version, _ in row["weight_versions"]]
        assert sum(count for _, count in row["weight_versions"]) == sum(row["mask"])
        assert record["step"] - 1 - 2 <= min(versions) and max(versions) <= record["step"] - 1


WITH_TOOLS = (
    *("algorithm.adv_estimator=gae", "env.env_name=informal_math", "env.max_steps=2", "env.max_tokens_per_turn=12"),
    *('env.prompt="{question}"', "data.max_response_length=64", "data.val_files="),
)
GREEDY = ("algorithm.adv_estimator=remax", "data.max_response_length=48", "data.val_files=")


@pytest.mark.parametrize(
    ("mode", "settings", "metric"),
    [(SEPARATE, WITH_TOOLS, "critic/grad_norm"), (CARRY, GREEDY, "baseline/mean")],
    ids=["tools", "remax"],
)
@pytest.mark.core
def test_critic_with_tools_and_greedy_baseline(ppo: Runner, mode: str, settings: Sequence[str], metric: str) -> None:
    done = ppo.run(
        *(LOCAL, mode, CORRECTED, "trainer.max_staleness=2", "trainer.total_training_steps=4", *settings),
        "actor_rollout_ref.rollout.max_num_seqs=24",
    )
    lines = done.metrics[1:]
    check_counts(lines)
    assert max(line["staleness/max"] for line in lines) > 0
    for line in lines:
        assert line["sync/probe_gap"] < 5e-5 and line["actor/grad_norm"] > 0 and metric in line
    if settings is WITH_TOOLS:
        turns = [turn for line in lines for record in done.rollouts(int(line["step"])) for turn in record["turns"]]
        assert any(turn["info"].get("tool_status") == "unreadable" for turn in turns)
