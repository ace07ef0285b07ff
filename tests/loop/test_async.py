"""Asynchronous training with staleness on the real engine. test_resume.py shows that a run without staleness equals the
synchronous one."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence

import pytest

from tests.loop.conftest import FinishedRun, Runner, wait_until_nothing_is_left
from tests.loop.stack import Case, StackRunner, parametrize

LOCAL = "trainer.controller=local"
CORRECTED = "algorithm.rollout_correction.method=tis"
CARRY, SEPARATE = "trainer.async_mode=carry", "trainer.async_mode=separate"


def check_counts(lines: Sequence[dict[str, float]]) -> None:
    """Check that every started group is trained on, dropped or carried, also over resumes."""
    carried = 0.0
    for line in lines:
        gone = sum(line[f"async/{name}"] for name in ("trained", "dropped_failed", "dropped_no_signal"))
        assert carried + line["async/started"] == gone + line["async/carried"]
        carried = line["async/carried"]


@pytest.mark.parametrize(
    ("mode", "engine", "controller"),
    [
        pytest.param(
            SEPARATE, "vllm", "trainer.controller=ray", marks=pytest.mark.nightly
        ),  # generates during the update
        (CARRY, "vllm", LOCAL),
    ],
)
def test_async_run_resumes_after_kill(ppo: Runner, mode: str, engine: str, controller: str) -> None:
    """Resumed in one process. Whether an answer has tokens of two versions depends on the time that answers take: that
    they continue with new weights is tested in test_engine_in_flight.py."""
    settings = (
        f"actor_rollout_ref.rollout.name={engine}",
        *(mode, CORRECTED, "trainer.max_staleness=2", "trainer.save_freq=3", "trainer.test_freq=3"),
        *("data.max_response_length=48", "actor_rollout_ref.rollout.max_num_seqs=24", "trainer.total_training_steps=6"),
        ppo.hold("learn", step=5),
    )
    killed = ppo.start(*settings, controller)
    progress = ppo.out / "test/run/checkpoints/step_000003/progress.json"
    killed.wait_for(progress.exists)
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


def check_late_rollouts(done: FinishedRun) -> None:
    lines = done.metrics[1:]
    check_counts(lines)
    assert max(line["staleness/max"] for line in lines) > 0
    for line in lines:
        assert line["sync/probe_gap"] < 5e-5 and line["actor/grad_norm"] > 0


def check_critic_with_tools(done: FinishedRun) -> None:
    check_late_rollouts(done)
    assert all("critic/grad_norm" in line for line in done.metrics[1:])
    turns = [turn for step in range(1, 5) for record in done.rollouts(step) for turn in record["turns"]]
    assert any(turn["info"].get("tool_status") == "unreadable" for turn in turns)


def check_greedy_baseline(done: FinishedRun) -> None:
    check_late_rollouts(done)
    assert all("baseline/mean" in line for line in done.metrics[1:])


LATE = (
    *(CORRECTED, "trainer.max_staleness=2", "trainer.total_training_steps=4", "data.val_files="),
    "actor_rollout_ref.rollout.max_num_seqs=24",
)
TOOLS = (
    *("algorithm.adv_estimator=gae", "env.env_name=informal_math", "env.max_steps=2", "env.max_tokens_per_turn=12"),
    *('env.prompt="{question}"', "data.max_response_length=64"),
)
GREEDY = ("algorithm.adv_estimator=remax", "data.max_response_length=48")
CASES = {
    "critic_with_tools": Case(check_critic_with_tools, (SEPARATE, *LATE, *TOOLS), core=True),
    "greedy_baseline": Case(check_greedy_baseline, (CARRY, *LATE, *GREEDY), core=True),
}


@parametrize(CASES)
def test_method_with_late_rollouts(stack: StackRunner, case: Case) -> None:
    case.run(stack)
