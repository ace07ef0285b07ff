"""Loops of one's own (alphaapollo.Trainer): the verbs, the examples, resume bit for bit, and two ranks on Ray."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from alphaapollo import Trainer, make_row
from alphaapollo.engines.weight_sync.verification import WeightSyncError
from alphaapollo.observability import console
from alphaapollo.runs.command_history import read_history
from alphaapollo.runs.run_status import read_run_status
from alphaapollo.types import Prompt, Row
from alphaapollo.utils.plugins import is_available
from examples.own_loop import distill, dpo, grpo, learning_rates, own_loss, sft
from tests.loop.conftest import DEADLINE, MARK, ROOT, Runner, Task, child, wait_until_nothing_is_left
from tests.loop.own_loop_kit import Echo, check_curve, check_final_model, check_measured, count_digits
from tests.loop.ray_nodes import two_ray_nodes


@pytest.fixture(scope="module", autouse=True)
def keep_warm_process() -> Iterator[None]:
    """A trainer stops the fork server of its process when it ends. Later tests need the warm process."""
    with mock.patch.object(forkserver, "_forkserver", forkserver.ForkServer()):
        yield


CHAT = [{"role": "user", "content": "3+4=?"}]
QUICK = (
    "rollout.name=hf",
    "data.max_prompt_length=180",
    "data.max_response_length=8",
    "trainer.cpu_threads=1",
    "trainer.project_name=test",
)


def words(folder: Path, name: str = "run") -> list[str]:
    return [*QUICK, f"trainer.output_dir={folder}", f"trainer.experiment_name={name}"]


def train_one_step(t: Trainer) -> list[np.ndarray]:
    """Sample, train and publish. Returns the sampled tokens and the log-probs after the step."""
    groups = t.sample([CHAT, "7"], n=3, reward=count_digits)
    samples = [one for group in groups for one in group.trajectories]
    rows = [one.rows[0] for one in samples]
    t.forward_backward(rows, loss="ppo", advantages=[one.reward - 0.1 for one in samples])
    t.optim_step(lr=1e-2)
    t.publish()
    t.log(t.step + 1, groups, {"train/tokens": float(sum(len(row.token_ids) for row in rows))})
    return [np.array(row.token_ids) for row in rows] + t.log_probs(rows)


@pytest.mark.core
def test_a_saved_state_resumes_bit_for_bit(task: Task, tmp_path: Path) -> None:
    settings = {"model.path": task.model, "lora_rank": 4, "trainer.keep_best": "val/reward"}
    values = {"baseline": 0.1 + 0.2, "best": -math.inf, "curve": [1, None, {"a": True}], "name": "ü"}
    with Trainer(settings, *words(tmp_path)) as t:
        state = t.state
        assert state == {}
        state |= deepcopy(values)
        train_one_step(t)
        path = t.save()
        assert path == t.folder / "checkpoints" / "step_000001"
        straight = train_one_step(t)
        state["curve"].append("later")
        assert t.load("step_1") == 1 and state == values
        loaded = train_one_step(t)
        state["best"] = 2.0
        t.save("best")
        check_errors(t)
        os.environ["SET_IN_THE_BLOCK"] = "1"
    assert os.environ.pop("SET_IN_THE_BLOCK") == "1"
    with Trainer(settings, *words(tmp_path)) as t:  # from the newest checkpoint, step_000001
        assert t.step == 1 and t.state == values
        resumed = train_one_step(t)
        t.save()
        for step, reward in ((3, 1.0), (4, 0.5), (5, 0.25)):
            t.log(step, metrics={"actor/lr": 7.0, "val/reward": reward})
            t.save()
        assert t.load("best") == 2 and t.state["best"] == 2.0
        assert t.save().name == "step_000002" and (t.folder / "checkpoints/aside_step_000005").is_dir()
    for one, other, third in zip(straight, loaded, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
    aside = [f"aside_step_00000{step}" for step in (3, 4, 5)]
    assert sorted(os.listdir(t.folder / "checkpoints")) == [*aside, "best", "step_000002"]
    lines = [json.loads(line) for line in (t.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and "critic/score/mean" in lines[0]
    check_measured(lines)
    check_final_model(t.folder)
    check_curve(t.folder, tmp_path / "curve.png")
    assert len((t.folder / "rollouts" / "step_000002.jsonl").read_bytes().splitlines()) == 6


def refuse(call: Any, *facts: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert all(fact in str(refused.value) for fact in facts), refused.value


def check_errors(t: Trainer) -> None:
    """Each invalid input raises one error and changes nothing."""
    row, digest = make_row([5, 6, 7]), t.log_probs([make_row([5, 6, 7])])[0]

    def nan(logp: Any, columns: Any) -> Any:
        return logp * float("nan")

    refuse(lambda: t.forward_backward([make_row([5, 6], targets=[0, 9999])]), "target 9999", "vocabulary")
    refuse(lambda: t.forward_backward([make_row([5, 6], weights=[0, 0])]), "row 0 must be trained on some token")
    (group,) = t.sample([CHAT], n=2, temperature=0.5)
    heated = [one.rows[0] for one in group.trajectories]
    refuse(lambda: t.forward_backward(heated, loss="ppo", advantages=[1.0, -1.0]), "temperature 0.5", "temperature=1")
    (group,) = t.sample([CHAT], n=2)
    wrong = [replace(one.rows[0], logprobs=[-9.0] * len(one.rows[0].token_ids)) for one in group.trajectories]
    refuse(lambda: t.forward_backward(wrong, loss="ppo", advantages=[1.0, -1.0]), "-9 under", kind=WeightSyncError)
    t.optim_step(lr=0.0)  # drops the gradients
    refuse(lambda: t.forward_backward([row], nan), "not finite")
    refuse(lambda: t.optim_step(), "forward_backward")
    refuse(lambda: t.load("nowhere"), "nowhere", "step_000001")
    t.forward_backward([row])
    refuse(lambda: t.save(), "optim_step")
    t.clear_gradients()
    t.state["seen"] = {1: 0.5}
    refuse(lambda: t.save("refused"), "t.state['seen']", "the key 1")
    t.state["seen"] = [np.float32(1)]
    refuse(lambda: t.save("refused"), "t.state['seen'][0] is a float32", "float(value)")
    assert not [name for name in os.listdir(t.folder / "checkpoints") if "refused" in name]
    t.add_adapter("a")
    for use in (lambda: t.sample([CHAT], adapter=None), lambda: t.publish(adapter="a")):
        refuse(use, "rollout.lora=merged, rollout.name=hf", "rollout.name=vllm")
    t.remove_adapter("a")
    np.testing.assert_array_equal(t.log_probs([row])[0], digest)


def test_rollout_evaluate_and_awaitables(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("QUIET_SECONDS", 0.0), ("STATUS_SECONDS", 0.0), ("REFRESH_SECONDS", 0.01)):
        monkeypatch.setattr(console, name, seconds)
    with Trainer({"model.path": task.model, "env.max_steps": 3}, *words(tmp_path)) as t:
        printed = capsys.readouterr().out
        assert (f"view {t.folder}" in printed) == is_available("commands", "view") and re.search(
            r"^ *0:\d\d  (prepare|start)", printed, re.MULTILINE
        )
        (group,) = t.rollout([Prompt(0, "mine", CHAT)], n=2, environment=Echo)
        assert [one.score.reward for one in group.trajectories] == [2.0, 2.0] or group.trajectories[0].truncated
        first, again = (t.evaluate([CHAT, CHAT], count_digits, n=2, temperature=1.0) for _ in range(2))
        assert first == again and "val/reward" in first
        assert t.evaluate([Prompt(0, "exact/sum", CHAT, "7")])["val/failed"] == 0.0

        async def overlap() -> list[Any]:
            return await asyncio.gather(*(t.aio.sample([CHAT], n=2) for _ in range(3)))

        several = asyncio.run(overlap())
        assert len({tuple(one.rows[0].token_ids) for (group,) in several for one in group.trajectories}) > 1
        gap = max(np.abs(lp - row.logprobs).max() for row, lp in with_log_probs(t, several))
        assert gap < 1e-4
        assert len(capsys.readouterr().out.splitlines()) <= 1  # none of the verbs; perhaps the last one of the start
        status = read_run_status(t.folder)
        assert status and status.pid == os.getpid()
    assert not (t.folder / "model").exists()  # nothing was trained
    with pytest.raises(RuntimeError, match="inside `with"):
        t.publish()
    assert read_history(t.folder)[-1].state == "finished"


def with_log_probs(t: Trainer, groups: list[Any]) -> list[tuple[Row, np.ndarray]]:
    rows = [one.rows[0] for (group,) in groups for one in group.trajectories]
    return [*zip(rows, t.log_probs(rows), strict=True)]


def test_examples(task: Task, tmp_path: Path) -> None:
    """Each example runs, and the supervised ones learn."""

    def curve(name: str, metric: str) -> list[float]:
        lines = (tmp_path / "test" / name / "metrics.jsonl").read_bytes().splitlines()
        return [json.loads(line)[metric] for line in lines]

    model = str(task.model)
    sft.main(model, *words(tmp_path, "sft"), epochs=2)
    assert curve("sft", "train/loss")[-1] < curve("sft", "train/loss")[0] - 1
    dpo.main(model, *words(tmp_path, "dpo"), steps=4)
    losses = curve("dpo", "train/loss")
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4) and losses[-1] < losses[0] - 0.01
    grpo.main(model, *words(tmp_path, "grpo"), steps=2, size=2, n=2, num_val=2)
    assert "val/accuracy" in json.loads((tmp_path / "test/grpo/metrics.jsonl").read_bytes().splitlines()[-1])
    distill.main(model, model, *words(tmp_path, "distill"), steps=2, size=2)
    own_loss.main(model, *words(tmp_path, "own_loss"), steps=2, n=2)
    with (
        pytest.raises(ValueError, match="no engines"),
        Trainer({"model.path": model}, *words(tmp_path, "none"), engines=0) as t,
    ):
        with pytest.raises(ValueError, match="there are no engines"):
            t.publish()
        t.sample([CHAT])
    last = read_history(t.folder)[-1]
    assert last.state == "failed" and "no engines" in last.error
    assert len(curve("own_loss", "critic/score/mean")) == 2


SERVED = {"lora_rank": 8, "rollout.lora": "adapter", "rollout.max_loras": 4, "rollout.kv_cache_gib": 0.1}
ROWS = [make_row([5, 6, 7, 8, 9]), make_row([9, 5, 7])]
STEPS: dict[str, dict[str, Any]] = {
    "a": {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-4},
    "b": {"lr": 5e-2, "weight_decay": 0.5},
    "": {"lr": 2e-2},
}


def train_adapters(t: Trainer, *names: str, like: str | None = None) -> np.ndarray:
    """Take a step with each adapter, and return the log-probs of all."""
    for name in names:
        t.forward_backward(ROWS, adapter=name)
        t.optim_step(adapter=name, **STEPS[name if like is None else like])
    return np.stack([np.concatenate(t.log_probs(ROWS, adapter=name)) for name in names])


def sample_from(t: Trainer, adapter: str | Path | None) -> list[Row]:
    (group,) = t.sample([CHAT], n=2, seed=3, adapter=adapter)
    return [one.rows[0] for one in group.trajectories]


def read_samples(rows: list[Row]) -> list[Any]:
    return [[*row.token_ids, *row.logprobs] for row in rows]


def find_gap(t: Trainer, rows: list[Row], adapter: str) -> float:
    """Largest difference of the engine's log-probs from the trainer's."""
    found = t.log_probs(rows, adapter=adapter)
    return float(max(np.abs(one - row.logprobs).max() for one, row in zip(found, rows, strict=True)))


def check_served_adapters(t: Trainer, kept: Path) -> None:
    """Engines serve the published versions, a folder and the base model at the same time."""
    base = sample_from(t, None)
    assert read_samples(base) == read_samples(sample_from(t, ""))  # B is 0
    refuse(lambda: t.sample([CHAT], adapter="a"), "'a'", "publish")
    first = train_adapters(t, "a", "b")
    for number in range(2):
        assert t.publish(adapter="a")["sync/probe_gap"] < 5e-5
        t.publish(adapter="b", folder=kept / str(number))
        rows = {name: sample_from(t, name) for name in ("a", "b")}
        assert all(find_gap(t, rows[name], name) < 1e-4 < find_gap(t, rows[name], "") for name in rows)
        if number == 0:
            t.forward_backward(rows["a"], loss="ppo", advantages=[1.0, -1.0], adapter="a")
            t.optim_step(adapter="a", **STEPS["a"])
            train_adapters(t, "b")
    assert np.abs(train_adapters(t, "a", "b") - first).min(0).max() > 0.01
    assert read_samples(sample_from(t, kept / "1")) == read_samples(rows["b"])
    assert read_samples(sample_from(t, kept / "0")) != read_samples(rows["b"])
    assert read_samples(sample_from(t, None)) == read_samples(base)
    row_versions = {row.weight_versions[0][0] for one in (*rows.values(), base) for row in one}
    assert len(row_versions) == 3
    refuse(lambda: t.sample([CHAT], adapter=kept / "2"), str(kept / "2"))
    refuse(lambda: t.optim_step(adapter="a"), "forward_backward")
    refuse(lambda: t.forward_backward(ROWS, adapter="c"), "'c'", "a, b")
    refuse(lambda: t.publish(folder=kept / "3"), "folder")


def test_adapters_on_one_base(task: Task, tmp_path: Path) -> None:
    settings, engine = {"model.path": task.model, **SERVED}, "rollout.name=vllm"
    with Trainer(settings, *words(tmp_path), engine) as t:
        layers = t.list_adapted_layers()
        assert {layer.rpartition(".")[2] for layer in layers} > {"q_proj", "down_proj"}
        t.add_adapter("a", lora_rank=4, lora_alpha=8.0, target_modules=["q_proj", "down_proj"])
        t.add_adapter("b", seed=1)
        check_served_adapters(t, tmp_path / "kept")
        t.save_adapter("b", tmp_path / "saved")
        expected = train_adapters(t, "b")
        t.load_adapter("c", tmp_path / "saved")
        np.testing.assert_array_equal(train_adapters(t, "c", like="b"), expected)
        t.load_adapter("c", tmp_path / "saved", with_optimizer=False)
        assert np.abs(train_adapters(t, "c", like="b") - expected).max() > 1e-4
        t.remove_adapter("c")
        assert t.adapters == ["a", "b"]
        refuse(lambda: t.load_adapter("c", tmp_path / "nowhere"), "nowhere")
        refuse(lambda: t.add_adapter("a"), "'a'")
        t.log(1, metrics={"train/loss": 1.0})
        t.save()
        straight = train_adapters(t, *STEPS)
        assert t.load("step_1") == 1
        np.testing.assert_array_equal(train_adapters(t, *STEPS), straight)
        refuse(lambda: t.sample([CHAT], adapter="a"), "'a'", "publish")
    with Trainer(settings, *words(tmp_path), engine) as t:  # from step_000001
        assert t.adapters == ["a", "b"]
        np.testing.assert_array_equal(train_adapters(t, *STEPS), straight)
        t.publish(adapter="a")
        assert find_gap(t, sample_from(t, "a"), "a") < 1e-4
        t.publish()
        assert find_gap(t, sample_from(t, ""), "") < 1e-4
    learning_rates.main(str(task.model), *words(tmp_path, "rates"), engine, "model.dtype=float32", steps=2, size=2, n=2)
    last = json.loads((tmp_path / "test/rates/metrics.jsonl").read_bytes().splitlines()[-1])
    assert len([name for name in last if name.startswith("reward/lr_")]) == 4


SCRIPT = """
import sys
from alphaapollo import Trainer, make_row

rows = [make_row([5, 6, 7, 8, 9][: 2 + number % 4], mark=number) for number in range(5)]
with Trainer({"model.path": sys.argv[1]}, *sys.argv[2:], engines=1, ranks=1) as t:
    for half in (rows[:2], rows[2:]):
        t.forward_backward(half, lambda logp, columns: -logp * columns["mark"][:, None], denominator=9.0)
    print("step", t.optim_step(lr=1e-2), t.publish().keys())
    print("logprobs", [round(float(one), 5) for array in t.log_probs(rows) for one in array])
    samples = t.sample([[{"role": "user", "content": "3+4=?"}]], n=2, temperature=0.0)
    print("sample", [*samples[0].trajectories[0].rows[0].token_ids], flush=True)
    t.sample(["7"], n=int(input()))
"""


def read_printed(lines: str) -> dict[str, str]:
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines.splitlines()}


@pytest.mark.nightly
def test_two_nodes_equal_one_process_and_a_death_is_named(
    ppo: Runner, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script without a main guard, whose function is sent to the workers on two nodes, and the same in this
    process."""
    script = ppo.out / "script.py"
    script.write_text(SCRIPT)
    argv = [str(script), str(task.model)]
    with two_ray_nodes(tmp_path, monkeypatch, **{MARK: str(ppo.out)}):
        command = [sys.executable, *argv, *words(ppo.out, "two_nodes"), "trainer.nnodes=2"]
        environment, printed = os.environ | {"PYTHONPATH": str(ROOT), MARK: str(ppo.out)}, ""
        errors, pipe = tmp_path / "errors.txt", subprocess.PIPE
        with (
            errors.open("w") as file,
            subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=file, text=True, env=environment, cwd=ppo.out
            ) as program,
        ):
            for line in program.stdout or ():
                printed += line
                if line.startswith("sample"):
                    break
            pid = child(ppo, "RolloutActor")
            os.kill(pid, signal.SIGKILL)
            program.communicate("1\n", timeout=DEADLINE)
        assert program.returncode == 1, printed + errors.read_text()
        assert f"WorkerDied: the rollout worker of rank 0 (pid {pid})" in errors.read_text()
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(sys, "argv", [*argv, *words(ppo.out, "one_process")])
    monkeypatch.setattr("builtins.input", lambda: "1")
    runpy.run_path(str(script), run_name="__main__")
    one, two = read_printed(capsys.readouterr().out), read_printed(printed)
    assert one["sample"] == two["sample"] and "sync/probe_gap" in two["step"]
    np.testing.assert_allclose(json.loads(one["logprobs"]), json.loads(two["logprobs"]), atol=2e-4)
    wait_until_nothing_is_left(ppo)
