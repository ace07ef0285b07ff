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
from tests.loop.replays import equal_lines, recording, replay
from tests.mock_judge import MockJudge

LOCAL = "trainer.controller=local"


@dataclass(frozen=True)
class Resumed:
    """A run of four iterations in one process, and a run of two iterations in one process and two more on Ray."""

    runner: Runner
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
    runner.run(*settings, LOCAL, "trainer.total_training_steps=2", name="parts")
    parts = runner.run(
        *settings,
        "trainer.total_training_steps=4",
        "trainer.profile_steps=[4]",
        "trainer.record_steps=[4]",
        name="parts",
    )
    wait_until_nothing_is_left(runner)
    yield Resumed(runner, settings, whole, parts)
    runner.close()


@pytest.mark.core
def test_resume_on_ray_equals_uninterrupted_local_run(resumed: Resumed) -> None:
    whole, parts = resumed.whole, resumed.parts
    assert "resumed from" in parts.output
    assert "trainer.total_training_steps: 2 -> 4: applied" in parts.output
    assert [line["step"] for line in parts.metrics] == [0, 1, 2, 3, 4]
    for one, other in zip(whole.metrics, parts.metrics, strict=True):
        for name in ("critic/score/mean", "actor/loss", "actor/grad_norm", "actor/ref_kl", "response_length/mean"):
            assert one.get(name) == other.get(name), (one["step"], name)
    first, second = ((run.folder / "model/model.safetensors").read_bytes() for run in (whole, parts))
    assert first == second


@pytest.mark.core
def test_iteration_recorded_on_ray_replays_in_one_process(resumed: Resumed) -> None:
    """Bitwise. test_resume_on_ray... shows that recording changes no result."""
    again = replay(resumed.runner, recording(resumed.parts, 4))
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
    again = resumed.runner.run(*resumed.settings, "trainer.total_training_steps=4", name="parts")
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
    assert (done.folder / "rollouts/val_000004.jsonl").exists()
    assert sorted(path.name for path in (done.folder / "checkpoints").iterdir()) == ["step_000002", "step_000004"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(done.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(done.folder / "model")
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.core
def test_no_file_contains_the_secret(resumed: Resumed) -> None:
    assert files_with_secret(resumed.whole) == files_with_secret(resumed.parts) == []


@pytest.mark.core
def test_rollout_log_contains_every_token(resumed: Resumed) -> None:
    for done in (resumed.whole, resumed.parts):
        for record in done.rollouts(3):
            (row,) = record["rows"]
            assert len(row["ids"]) == len(row["mask"]) == len(row["logprobs"])
            assert sum(row["mask"]) == record["turns"][0]["num_tokens"]
            assert {"reward", "components", "outcome", "stop_reason", "weight_version", "text"} <= record.keys()


@pytest.mark.core
def test_ppo_with_critic_and_warmup(ppo: Runner) -> None:
    done = ppo.run(
        LOCAL,
        "algorithm.adv_estimator=gae",
        "env.rollout.n=1",
        "data.train_batch_size=16",
        "trainer.critic_warmup=1",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "trainer.total_training_steps=3",
    )
    first, second, third = done.metrics[1:]
    assert first["critic/grad_norm"] > 0
    assert "actor/grad_norm" not in first  # warming up
    assert second["actor/grad_norm"] > 0
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in (first, second, third)]
    assert coefficients[0] == coefficients[1] != coefficients[2]


def judge_digits(content: str) -> str:
    """Reply of a judge about the criterion `digits`."""
    answer = content.partition("<answer>\n")[2].rpartition("\n</answer>\n\n<criteria>")[0]
    return f'It is so: {{"digits": {int(any(map(str.isdigit, answer)))}}}'


def test_rloo_with_two_epochs_full_kl_and_a_rubric(ppo: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with MockJudge(judge_digits).serve() as judge:
        done = ppo.run(
            LOCAL,
            "algorithm.adv_estimator=rloo",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "actor_rollout_ref.actor.kl_loss_type=full",
            "reward.judge.model=mock",
            f"reward.judge.base_url={judge.url}",
            "reward.rubric.criteria={digits: {text: The answer has digits}}",
            "reward.components={rubric: 0.5}",
        )
    last = done.metrics[-1]
    assert last["actor/grad_norm"] > 0 and last["actor/ref_kl"] > 0
    assert last["judge/judgements"] == last["rollout/trajectories"] == 16 and last["outcome/failed"] == 0
    assert 0 <= last["judge/cache_hit_rate"] < 1 and last["judge/seconds"] > 0
    for record in done.rollouts(2):
        parts, text = record["components"], record["turns"][-1]["text"].rpartition("</think>")[2]
        assert parts["rubric"] == parts["rubric/digits"] == any(map(str.isdigit, text))
        assert record["reward"] == pytest.approx(parts["task"] + 0.5 * parts["rubric"])


@pytest.mark.core
def test_dapo_filter_refills_the_batch(ppo: Runner) -> None:
    settings = ("algorithm=dapo", "algorithm.filter_groups.max_num_gen_batches=3", "data.max_response_length=4")
    done = ppo.run(LOCAL, *settings)
    rounds = [line["rollout/rounds"] for line in done.metrics[1:]]
    kept = [line["rollout/groups_kept"] for line in done.metrics[1:]]
    assert all(1 <= count <= 3 for count in rounds)
    assert all(groups == 4 or count == 3 for groups, count in zip(kept, rounds, strict=True))


def test_bfloat16_engine_mismatch_is_measured_and_corrected(ppo: Runner) -> None:
    done = ppo.run(
        LOCAL,
        "algorithm=tis",
        "algorithm.rollout_correction.high=1.0",
        "env.rollout.n=4",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    )
    last = done.metrics[-1]
    assert 5e-5 < last["sync/probe_gap"] < 0.1
    assert last["mismatch/k3"] > 1e-8 and last["mismatch/rho_p01"] < 1.0 < last["mismatch/rho_p99"]
    assert 0.9 < last["actor/correction_weight"] < 1.0  # rho is cut at 1
    assert last["actor/grad_norm"] > 0


def test_hard_resets_and_the_best_checkpoint_survive_a_resume(ppo: Runner) -> None:
    """ProRL: one reset before the checkpoint that the run resumes from, and one after it."""
    settings = (
        LOCAL,
        "algorithm=prorl",
        "algorithm.filter_groups.enable=False",
        "algorithm.reference_reset.patience=null",
        "algorithm.reference_reset.every=2",
        "env.rollout.n=4",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "trainer.max_ckpt_to_keep=1",
        "trainer.keep_best=val/accuracy",
    )
    whole = ppo.run(*settings, "trainer.total_training_steps=4", name="whole")
    ppo.run(*settings, "trainer.total_training_steps=2", name="parts")
    parts = ppo.run(*settings, "trainer.total_training_steps=4", name="parts")
    assert [line["reference/resets"] for line in whole.metrics[1:]] == [0, 1, 1, 2]
    assert whole.metrics[3]["actor/ref_kl"] < whole.metrics[2]["actor/ref_kl"]
    best = max((2, 4), key=lambda step: (whole.metrics[step]["val/accuracy"], step))
    for run in (whole, parts):
        kept = {path.name for path in (run.folder / "checkpoints").glob("step_*")}
        assert kept == {f"step_{step:06d}" for step in (best, 4)}
        assert f"val/accuracy is best in {run.folder}/checkpoints/step_{best:06d}" in " ".join(run.output.split())
    for one, other in zip(whole.metrics, parts.metrics, strict=True):
        for name in ("critic/score/mean", "actor/loss", "actor/ref_kl", "actor/grad_norm", "reference/resets"):
            assert one.get(name) == other.get(name), (one["step"], name)


def test_hf_engine(ppo: Runner) -> None:
    done = ppo.run(LOCAL, "actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=1")
    assert done.metrics[-1]["sync/probe_gap"] < 5e-5


OWN_ESTIMATOR = '''
from alphaapollo.algorithms.advantages import register_estimator
from alphaapollo.algorithms.advantages.base import from_scores

@register_estimator("centred", group=True)
def centred(inputs, config):
    """The reward minus its mean over the batch."""
    return from_scores(inputs, lambda scores, groups: scores - scores.mean())
'''


def test_bfloat16_activation_checkpointing_trackers_and_custom_estimator(
    ppo: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    module = tmp_path / "own.py"
    module.write_text(OWN_ESTIMATOR)
    done = ppo.run(
        LOCAL,
        f"algorithm.custom_module={module}",
        "algorithm.adv_estimator=centred",
        "actor_rollout_ref.model.dtype=bfloat16",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "trainer.logger=[console,tensorboard,wandb]",
    )
    assert done.metrics[-1]["actor/grad_norm"] > 0
    assert done.metrics[-1]["sync/probe_gap"] < 0.1
    assert list((done.folder / "tensorboard").glob("events.*"))
    assert list((done.folder / "wandb").glob("offline-run-*"))
    assert files_with_secret(done) == []


def test_run_on_two_nodes_of_an_existing_cluster(ppo: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank and one engine per node: weights are synced to the other node. scripts/cluster_check has tests with
    separate machines."""
    with two_ray_nodes(tmp_path, monkeypatch):
        done = ppo.run(
            "trainer.total_training_steps=1",
            "trainer.nnodes=2",
            "actor_rollout_ref.rollout.num_engines=2",
            "actor_rollout_ref.rollout.name=hf",
        )
    assert done.metrics[-1]["step"] == 1 and done.metrics[-1]["sync/probe_gap"] < 1e-5


def test_stages_open_at_their_gates_and_stay_open_after_resume(ppo: Runner, tmp_path: Path) -> None:
    frame = pd.read_parquet(ppo.task.data / "train.parquet")
    sources = ("first", "second", "third")
    frame["data_source"] = [sources[index % 3] for index in range(len(frame))]
    frame.to_parquet(tmp_path / "train.parquet")
    stages = (
        "{data_source: first, threshold: 0.01}",
        "{data_source: second, metric: val/accuracy, threshold: 0}",
        "{data_source: third}",
    )
    settings = (
        LOCAL,
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.curriculum.stages=[{','.join(stages)}]",
        "trainer.save_freq=1",
        "trainer.test_freq=2",
    )
    ppo.run(*settings, "trainer.total_training_steps=2")
    done = ppo.run(*settings, "trainer.total_training_steps=4")
    lines = [line for line in done.metrics if "actor/loss" in line]
    opened = [line["curriculum/stage"] for line in lines]
    assert opened[0] in (1, 2) and opened[-1] == 3 and opened == sorted(opened)
    for step, number in enumerate([1, *opened[:-1]], 1):
        drawn = {record["data_source"] for record in done.rollouts(step)}
        assert drawn <= set(sources[: int(number)]), (step, drawn)


def test_changed_data_is_refused_or_trained_in_a_new_order(ppo: Runner, tmp_path: Path) -> None:
    frame, file = pd.read_parquet(ppo.task.data / "train.parquet")[:8], tmp_path / "train.parquet"
    frame.to_parquet(file)
    settings = (LOCAL, f"data.train_files={file}", "trainer.save_freq=1", "trainer.val_before_train=false")
    ppo.run(*settings, "trainer.total_training_steps=1")
    frame[::-1].to_parquet(file)
    with pytest.raises(ValueError, match="resume_with_other_data=true"):
        ppo.prepare(*settings, "trainer.total_training_steps=3")
    done = ppo.run(*settings, "trainer.total_training_steps=3", "trainer.resume_with_other_data=true")
    assert "other data" in done.output
    trained = [{record["prompt_id"] for record in done.rollouts(step)} for step in (2, 3)]
    assert [len(one) for one in trained] == [4, 4] and trained[0] | trained[1] == {*range(8)}
    again = ppo.run(*settings, "trainer.total_training_steps=5")
    trained = [{record["prompt_id"] for record in again.rollouts(step)} for step in (4, 5)]
    assert "other data" not in again.output and trained[0] | trained[1] == {*range(8)}
