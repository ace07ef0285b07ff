"""On-policy distillation without a reward, synchronous, asynchronous and replayed; a teacher with another tokenizer;
and a teacher behind a vLLM server."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from examples.quickstart.make_task import make_model, make_tokenizer
from tests.loop.conftest import DEADLINE, ROOT, Runner
from tests.loop.warm import Program

LOCAL = "trainer.controller=local"
UNREWARDED = "custom_reward_function.path="  # the task has no built-in grader either


def make_teacher(folder: Path, more_words: tuple[str, ...] = ()) -> Path:
    make_tokenizer(folder, more_words)
    make_model(folder, seed=1)
    return folder


@pytest.mark.core
def test_student_approaches_teacher_without_a_reward(ppo: Runner, tmp_path: Path) -> None:
    teacher = f"teacher.model.path={make_teacher(tmp_path / 'teacher')}"
    shared = (LOCAL, UNREWARDED, "algorithm=distill", "algorithm.adv_estimator=none", teacher, "env.rollout.n=4")
    done = ppo.run(*shared, "trainer.record_steps=[2]", "trainer.total_training_steps=3", name="whole")
    lines = [line for line in done.metrics if "actor/loss" in line]
    distances = [line["distill/reverse_kl"] for line in lines]
    assert distances[0] > distances[1] > distances[2] > 0
    assert all(line["distill/divergence"] == pytest.approx(line["distill/reverse_kl"], rel=1e-4) for line in lines)
    assert all(line["critic/score/mean"] == 0 for line in lines)
    assert "divergence" in done.output and "nothing gives a reward" in " ".join(done.output.split())

    words = [str(done.folder / "recorded/step_000002")]
    replay = Program(
        "alphaapollo.trainer.replay.__main__", words, tmp_path / "replay.txt", dict(os.environ), ROOT, warm=True
    )
    assert replay.wait(DEADLINE) == 0, replay.printed[-4000:]

    behind = ("trainer.async_mode=carry", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis")
    done = ppo.run(*shared, *behind, "teacher.divergence=sampled", "trainer.total_training_steps=3", name="sampled")
    assert all(line["actor/grad_norm"] > 0 for line in done.metrics if "actor/loss" in line)
    assert all(0 < line["distill/agreement"] < 1 for line in done.metrics if "actor/loss" in line)


def test_teacher_with_another_tokenizer_is_refused(ppo: Runner, tmp_path: Path) -> None:
    """A teacher with more tokens works with teacher.divergence=sampled."""
    teacher = f"teacher.model.path={make_teacher(tmp_path / 'teacher', ('<left>',))}"
    error = ppo.refuse("algorithm=distill", teacher)
    assert "'<left>'" in error and "teacher.divergence=sampled" in error
    ppo.prepare("algorithm=distill", teacher, "teacher.divergence=sampled")


def start_server(model: Path, output: Path, ppo: Runner) -> str:
    """Start a server with a model named `big`. Returns its base_url."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", model, "--port", port, "--name", "big", "rollout.kv_cache_gib=0.1"]
    server = Program("alphaapollo", words, output, os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, ROOT, warm=False)
    ppo.programs.append(server)
    end = time.monotonic() + DEADLINE
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert server.wait(0.2) is None and time.monotonic() < end, server.printed[-4000:]
    return f"http://127.0.0.1:{port}/v1"


def test_teacher_behind_a_server_equals_the_same_model_on_the_ranks(ppo: Runner, tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    url = start_server(teacher, tmp_path / "server.txt", ppo)
    near = f"teacher.model.path={teacher}"
    far = (
        f"teacher.models={{near:{{path:{teacher}}},far:{{base_url:'{url}',name:big}}}}",
        "teacher.by_source={quickstart/*:{near:0.25,far:0.75}}",
    )
    shared = (LOCAL, UNREWARDED, "trainer.test_freq=-1", "trainer.total_training_steps=1")
    for name, words in {
        "distill": ("algorithm=distill", "algorithm.adv_estimator=none", "teacher.top_k=5"),
        "mopd": ("algorithm=mopd", "algorithm.adv_estimator=none"),
    }.items():
        alone = ppo.run(*shared, *words, near, name=f"{name}_near").metrics
        mixed = ppo.run(*shared, *words, *far, name=f"{name}_far").metrics
        (one,), (other,) = ([line for line in lines if "actor/loss" in line] for lines in (alone, mixed))
        names = [key for key in one if key.startswith("distill/")] + ["actor/loss", "actor/grad_norm"]
        assert len(names) == (6 if name == "distill" else 4)
        assert {key: other[key] for key in names} == pytest.approx({key: one[key] for key in names}, rel=1e-3)

    other = make_teacher(tmp_path / "other", ("<left>",))
    with pytest.raises(ValueError, match="'<left>'"):
        ppo.prepare("algorithm=distill", f"actor_rollout_ref.model.path={other}", *far, "teacher.divergence=sampled")
    ppo.programs[0].signal(signal.SIGTERM)
    assert ppo.programs[0].wait(DEADLINE) is not None
