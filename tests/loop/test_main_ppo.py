"""main_ppo end to end: on Ray or in one process, FSDP2 and vLLM on a CPU, a few iterations."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
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

FAKE = "actor_rollout_ref.rollout.name=fake"
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
    parts = runner.run(*settings, *four, name="parts", warm=False)
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


def test_changed_data_is_trained_in_a_new_order(stack: StackRunner, tmp_path: Path) -> None:
    frame, file = pd.read_parquet(stack.task.data / "train.parquet")[:8], tmp_path / "train.parquet"
    frame.to_parquet(file)
    settings = (FAKE, f"data.train_files={file}", "trainer.save_freq=1", "trainer.val_before_train=false")
    stack.run(*settings, "trainer.total_training_steps=1")
    frame[::-1].to_parquet(file)
    done = stack.run(*settings, "trainer.total_training_steps=3", "trainer.resume_with_other_data=true")
    trained = [{record["prompt_id"] for record in done.rollouts(step)} for step in (2, 3)]
    assert [len(one) for one in trained] == [4, 4] and trained[0] | trained[1] == {*range(8)}


def test_mixture_with_a_system_prompt_stops_early_and_resumes(stack: StackRunner, tmp_path: Path) -> None:
    """Two files, of which the first has three quarters of the prompts. The fake engine's reward is constant: the
    validations after iterations 1, 2 and 3 do not improve on the one before training."""
    rows = pd.read_parquet(stack.task.data / "train.parquet")
    for name, part in (("a", rows[:6]), ("b", rows[6:14])):
        part.assign(data_source=name).to_parquet(tmp_path / f"{name}.parquet")
    settings = (
        *(FAKE, "data.max_prompt_length=64", "data.system_prompt='Be brief.'", "trainer.total_training_steps=6"),
        f"data.train_files=[{tmp_path}/a.parquet,{tmp_path}/b.parquet]",
        *("data.source_weights=[0.75,0.25]", "trainer.test_freq=1", "trainer.save_freq=1"),
        *("trainer.early_stopping_metric=val/reward", "trainer.early_stopping_patience=3"),
    )
    whole = stack.run(*settings, name="whole")
    assert "ended after 3 of 6 iterations: 3 validations have not improved val/reward" in whole.output
    assert "8 rows, 25% of the prompts" in whole.output and (whole.folder / "checkpoints/step_000003").is_dir()
    drawn = [record["prompt_id"] for step in (1, 2, 3) for record in whole.rollouts(step) if not record["sample"]]
    assert len(drawn) == 12 and sum(row < 6 for row in drawn) in (8, 9, 10)  # of an epoch of 10 + 4 rows
    first = whole.rollouts(1)[0]["prompt"]
    assert [message["role"] for message in first] == ["system", "user"] and first[0]["content"] == "Be brief."
    assert any(name.startswith("source/b/") for name in whole.metrics[1])

    parts = stack.run(*settings, "trainer.stop_at_step=2", name="parts")
    assert "ended after 2 of 6 iterations: trainer.stop_at_step=2" in parts.output
    parts = stack.run(*settings, name="parts")
    check_equal_runs(whole, parts)
    assert "already complete: the run ended after 3 of 6" in stack.run(*settings, name="parts").output
