"""main_ppo end to end: on Ray or in one process, FSDP2 and vLLM on a CPU, a few iterations."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.loop.conftest import (
    FinishedRun,
    Runner,
    Task,
    check_first_and_last_lines,
    files_with_secret,
    wait_until_nothing_is_left,
)
from tests.loop.ray_nodes import two_ray_nodes
from tests.loop.replays import check_equal_runs, equal_lines, recording, replay
from tests.loop.stack import StackRunner

LOCAL = "trainer.controller=local"


@dataclass(frozen=True)
class Resumed:
    """A run of four iterations in one process, and a run of two iterations in one process and two more on Ray."""

    stack: StackRunner
    settings: tuple[str, ...]
    whole: FinishedRun
    parts: FinishedRun


@pytest.fixture(scope="module")
def resumed(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    runner = Runner(task, tmp_path_factory.mktemp("resumed"))
    settings = (
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
        "actor_rollout_ref.rollout.val_kwargs.greedy=True",
        "trainer.save_freq=2",
        "trainer.test_freq=1",
    )
    whole = runner.run(*settings, LOCAL, "trainer.total_training_steps=4", "trainer.profile_steps=[3]", name="whole")
    stack = StackRunner(task, runner.out)
    stack.run(*settings, "trainer.total_training_steps=2", name="parts")
    four = ("trainer.total_training_steps=4", "trainer.profile_steps=[4]", "trainer.record_steps=[4]")
    parts = runner.run(*settings, *four, name="parts")
    wait_until_nothing_is_left(runner)
    yield Resumed(stack, settings, whole, parts)
    runner.close()


@pytest.mark.core
def test_resume_on_ray_equals_uninterrupted_local_run(resumed: Resumed) -> None:
    whole, parts = resumed.whole, resumed.parts
    assert "resumed from" in parts.output
    assert "trainer.total_training_steps: 2 -> 4: applied" in parts.output
    assert [line["step"] for line in parts.metrics] == [0, 1, 2, 3, 4]
    check_equal_runs(whole, parts)
    assert files_with_secret(whole) == files_with_secret(parts) == []


@pytest.mark.core
def test_iteration_recorded_on_ray_replays_in_one_process(resumed: Resumed) -> None:
    """Bitwise. test_resume_on_ray... shows that recording changes no result."""
    again = replay(resumed.stack, recording(resumed.parts, 4))
    assert equal_lines(again) > 40 and "\nref_logprobs " in again.output


@pytest.mark.core
def test_profile_has_all_processes_on_one_clock(resumed: Resumed) -> None:
    """In one process and on Ray. test_resume_on_ray... shows that profiling changes no result."""
    for done, step in ((resumed.whole, 3), (resumed.parts, 4)):
        assert [file.name for file in (done.folder / "profiles").iterdir()] == [f"step_{step:06d}.json.gz"]
        with gzip.open(done.folder / "profiles" / f"step_{step:06d}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        tracks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert list(tracks.values()) == ["controller", "policy 0", "rollout 0"]
        spans = [event for event in events if event["ph"] == "X"]
        begins, ends = ([event for event in events if event["ph"] == phase] for phase in "be")  # of episodes
        spans += [one | {"dur": end["ts"] - one["ts"]} for one, end in zip(begins, ends, strict=True)]

        def of(track: str, name: str, spans: list = spans, tracks: dict = tracks) -> list[tuple[float, float]]:
            own = [one for one in spans if (tracks[one["pid"]], one["name"]) == (track, name)]
            return [(one["ts"], one["ts"] + one["dur"]) for one in own]

        ((begin, end),) = of("controller", "generate")[:1]
        episodes, slack = of("rollout 0", "episode"), 0.2e6  # two processes' clocks
        assert len(episodes) == 16 + 8 * 2 and len(of("rollout 0", "grade")) == len(episodes)
        assert sum(begin - slack <= first and last <= end + slack for first, last in episodes) >= 16
        (update,) = of("controller", "update")
        backward = {one["name"] for one in spans if tracks[one["pid"]] == "policy 0" and "Backward" in one["name"]}
        passes = [span for name in backward for span in of("policy 0", name)]
        assert passes and all(update[0] - slack <= first and last <= update[1] + slack for first, last in passes)
    assert "\ntime: " in resumed.whole.output
    assert "\nval sample: reward " in resumed.whole.output


@pytest.mark.core
def test_output_begins_with_the_viewer_and_ends_with_changes_and_next_commands(resumed: Resumed) -> None:
    for done, duration in ((resumed.whole, r"\(\d+:\d\d\)"), (resumed.parts, r"\(\d+:\d\d since iteration 2\)")):
        check_first_and_last_lines(done, "view", "report", "samples", "chat")
        start, end = done.metrics[0]["val/accuracy"], done.metrics[-1]["val/accuracy"]
        assert re.search(rf"\nval/accuracy +{start:.3f} -> {end:.3f} in 4 iterations.* {duration}\n", done.output)
        assert f"\nmodel: {done.folder / 'model'}\n" in done.output
        assert "\x1b" not in done.output


@pytest.mark.core
def test_complete_run_starts_nothing(resumed: Resumed) -> None:
    folder = resumed.parts.folder
    written = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    again = resumed.stack.run(*resumed.settings, "trainer.total_training_steps=4", name="parts")
    assert "all 4 iterations are done" in again.output
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == written


@pytest.mark.core
def test_grpo_writes_the_run_folder(resumed: Resumed) -> None:
    done = resumed.parts
    start, last = done.metrics[0], done.metrics[-1]
    assert {"val/accuracy", "val/accuracy_greedy"} <= start.keys() & last.keys()
    assert last["rollout/trajectories"] == 16
    assert last["actor/grad_norm"] > 0
    assert last["sync/probe_gap"] < 5e-5
    assert last["memory/policy_rss_gib"] > 0.1 and last["memory/engine_gib"] > 0.1
    assert all(value is None or math.isfinite(value) for value in last.values())

    assert yaml.safe_load((done.folder / "config.yaml").read_text())["algorithm"]["adv_estimator"] == "grpo"
    assert len(done.rollouts(4)) == 16
    for record in done.rollouts(3):
        (row,) = record["rows"]
        assert len(row["ids"]) == len(row["mask"]) == len(row["logprobs"])
        assert sum(row["mask"]) == record["turns"][0]["num_tokens"]
    assert (done.folder / "rollouts/val_000004.jsonl").exists()
    assert sorted(path.name for path in (done.folder / "checkpoints").iterdir()) == ["step_000002", "step_000004"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(done.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(done.folder / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_an_engine_on_another_node_receives_what_changed(
    ppo: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first weight sync is complete. Then a small learning rate changes few weights in bfloat16."""
    with two_ray_nodes(tmp_path, monkeypatch):
        done = ppo.run(
            "trainer.total_training_steps=2",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            "actor_rollout_ref.actor.optim.lr=1e-6",
        )
    complete, *changed = [line["sync/copied_gib"] for line in done.metrics]
    assert len(changed) == 2 and all(0 < one < complete / 5 for one in changed), done.metrics
