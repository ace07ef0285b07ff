"""On-policy distillation without a reward, synchronous, asynchronous and replayed; a teacher with another tokenizer;
and a teacher behind a vLLM server."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.quickstart.make_task import make_model, make_tokenizer
from tests.loop.conftest import DEADLINE, ROOT
from tests.loop.replays import equal_lines, recording, replay
from tests.loop.stack import StackRunner
from tests.loop.warm import Program

UNREWARDED = "custom_reward_function.path="  # the task has no built-in grader either


def make_teacher(folder: Path, more_words: tuple[str, ...] = ()) -> Path:
    make_tokenizer(folder, more_words)
    make_model(folder, seed=1)
    return folder


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return make_teacher(tmp_path / "teacher")


@pytest.mark.core
def test_student_approaches_teacher_without_a_reward(stack: StackRunner, teacher: Path) -> None:
    shared = (
        *(UNREWARDED, "algorithm=distill", "algorithm.adv_estimator=none", f"teacher.model.path={teacher}"),
        *("env.rollout.n=4", "trainer.total_training_steps=3"),
    )
    done = stack.run(*shared, "trainer.record_steps=[2]", name="whole")
    lines = done.metrics[1:]
    distances = [line["distill/reverse_kl"] for line in lines]
    assert distances[0] > distances[1] > distances[2] > 0
    assert all(line["distill/divergence"] == pytest.approx(line["distill/reverse_kl"], rel=1e-4) for line in lines)
    assert all(line["critic/score/mean"] == 0 for line in lines)
    assert "divergence" in done.output and "nothing gives a reward" in " ".join(done.output.split())
    assert equal_lines(replay(stack, recording(done, 2))) > 40

    behind = ("trainer.async_mode=carry", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis")
    done = stack.run(*shared, *behind, "teacher.divergence=sampled", name="sampled")
    assert all(line["actor/grad_norm"] > 0 and 0 < line["distill/agreement"] < 1 for line in done.metrics[1:])


def test_teacher_with_another_tokenizer_is_refused(stack: StackRunner, tmp_path: Path) -> None:
    """A teacher with more tokens works with teacher.divergence=sampled."""
    teacher = f"teacher.model.path={make_teacher(tmp_path / 'teacher', ('<left>',))}"
    error = stack.refuse("algorithm=distill", teacher)
    assert "'<left>'" in error and "teacher.divergence=sampled" in error
    stack.prepare("algorithm=distill", teacher, "teacher.divergence=sampled")


@pytest.fixture
def url(stack: StackRunner, teacher: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a server with the teacher, as the model `big`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", teacher, "--port", port, "--name", "big", "rollout.kv_cache_gib=0.1"]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    server = Program("alphaapollo", words, tmp_path / "server.txt", environment, ROOT, warm=False)
    stack.programs.append(server)
    server.wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
    yield f"http://127.0.0.1:{port}/v1"
    server.signal(signal.SIGTERM)
    assert server.wait(DEADLINE) is not None


def test_teacher_behind_a_server_equals_the_same_model_on_the_ranks(
    stack: StackRunner, teacher: Path, tmp_path: Path, url: str
) -> None:
    near = f"teacher.model.path={teacher}"
    far = (
        f"teacher.models={{near:{{path:{teacher}}},far:{{base_url:'{url}',name:big}}}}",
        "teacher.by_source={quickstart/*:{near:0.25,far:0.75}}",
    )
    shared = (UNREWARDED, "algorithm.adv_estimator=none", "actor_rollout_ref.rollout.name=fake", "data.val_files=")
    shared += ("trainer.total_training_steps=1",)
    for name, num_metrics, *words in (("distill", 6, "teacher.top_k=5"), ("mopd", 4)):
        words += [*shared, f"algorithm={name}"]
        one = stack.run(*words, near, name=f"{name}_near").metrics[-1]
        other = stack.run(*words, *far, name=f"{name}_far").metrics[-1]
        names = [key for key in one if key.startswith("distill/")] + ["actor/loss", "actor/grad_norm"]
        assert len(names) == num_metrics
        assert {key: other[key] for key in names} == pytest.approx({key: one[key] for key in names}, rel=1e-3)

    other = make_teacher(tmp_path / "other", ("<left>",))
    with pytest.raises(ValueError, match="'<left>'"):
        stack.prepare("algorithm=distill", f"actor_rollout_ref.model.path={other}", *far, "teacher.divergence=sampled")
