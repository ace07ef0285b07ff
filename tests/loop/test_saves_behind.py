"""Background checkpoints: interrupted while they are written, and damaged later."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.loop.conftest import DEADLINE, Runner
from tests.loop.warm import Program

SETTINGS = (
    *("trainer.controller=local", "actor_rollout_ref.rollout.name=fake", "trainer.save_freq=2"),
    *("trainer.max_ckpt_to_keep=null", "trainer.val_before_train=False", "trainer.total_training_steps=6"),
)
HOLD = """
import time
from pathlib import Path
from alphaapollo.models import checkpoint

write = checkpoint.write_snapshot

def hold(part, group):
    while "step_000004" in part.folder and not Path({release!r}).exists():
        time.sleep(0.01)
    write(part, group)

checkpoint.write_snapshot = hold
"""


def held(ppo: Runner, release: Path) -> Program:
    """Start a run that trains one more iteration while the write of its second checkpoint is blocked."""
    module = ppo.out / "hold.py"
    module.write_text(HOLD.format(release=str(release)))
    program = ppo.start(*SETTINGS, f"algorithm.custom_module={module}")
    metrics, end = ppo.out / "test/run/metrics.jsonl", time.monotonic() + DEADLINE
    while not (metrics.exists() and '"step": 5' in metrics.read_text()):
        assert program.wait(0.05) is None, program.printed[-4000:]
        assert time.monotonic() < end, program.printed[-4000:]
    assert (ppo.out / "test/run/checkpoints/.writing_step_000004").is_dir()
    assert names(ppo) == ["step_000002"]
    return program


def names(ppo: Runner) -> list[str]:
    return sorted(path.name for path in (ppo.out / "test/run/checkpoints").glob("step_*"))


@pytest.mark.core
def test_kill_during_write_resumes_from_the_previous_checkpoint(ppo: Runner, tmp_path: Path) -> None:
    whole = ppo.run(*SETTINGS, name="whole")
    assert "written while the next one runs" in " ".join(whole.output.split())
    program = held(ppo, tmp_path / "release")
    program.signal(signal.SIGKILL)
    program.wait()
    (tmp_path / "release").touch()
    done = ppo.run(*SETTINGS, f"algorithm.custom_module={ppo.out / 'hold.py'}")
    assert "resumed from" in done.output and "step_000002" in done.output
    assert names(ppo) == ["step_000002", "step_000004", "step_000006"]
    assert list((done.folder / "checkpoints").glob(".*")) == []
    for one, other in zip(whole.metrics, done.metrics, strict=True):
        for name in ("step", "critic/score/mean", "actor/loss", "actor/grad_norm"):
            assert one.get(name) == other.get(name), (one["step"], name)
    first, second = ((run.folder / "model/model.safetensors").read_bytes() for run in (whole, done))
    assert first == second
    written = {name for run in (whole, done) for line in run.metrics for name in line if name.startswith("checkpoint/")}
    assert written == {"checkpoint/write_seconds"}


def test_interrupt_waits_for_the_write(ppo: Runner, tmp_path: Path) -> None:
    release = tmp_path / "release"
    program = held(ppo, release)
    program.signal(signal.SIGTERM)
    end = time.monotonic() + DEADLINE
    while "waiting until the checkpoint of iteration 4 is written" not in program.printed:
        assert program.wait(0.05) is None, program.printed[-4000:]
        assert time.monotonic() < end, program.printed[-4000:]
    release.touch()
    done = ppo.finish(program)
    assert done.code == 130
    assert "the same command resumes from" in done.output and "step_000004" in done.output.splitlines()[-1]
    assert names(ppo) == ["step_000002", "step_000004"]


PAUSE = """
import asyncio
from pathlib import Path
from alphaapollo.trainer import lifecycle, loop

module = lifecycle if {part!r} == "learn" else loop
part = module.{part}

async def pause(run, step, *rest):
    if step == 4:
        Path({mark!r}).touch()
        await asyncio.sleep(2.0 if {part!r} == "learn" else 600)
    return await part(run, step, *rest)

module.{part} = pause
"""


@pytest.mark.parametrize(("part", "saved"), [("collect_groups", 3), ("learn", 4)])
def test_sigterm_saves_the_last_complete_iteration(ppo: Runner, tmp_path: Path, part: str, saved: int) -> None:
    """SIGTERM in the fourth iteration, before and during its update. The resumed run equals an uninterrupted run."""
    whole = ppo.run(*SETTINGS, name="whole")
    mark, module = tmp_path / "in_step_4", tmp_path / "pause.py"
    module.write_text(PAUSE.format(part=part, mark=str(mark)))
    program = ppo.start(*SETTINGS, "trainer.save_on_signal=true", f"algorithm.custom_module={module}")
    end = time.monotonic() + DEADLINE
    while not mark.exists():
        assert program.wait(0.05) is None, program.printed[-4000:]
        assert time.monotonic() < end, program.printed[-4000:]
    program.signal(signal.SIGTERM)
    ended = ppo.finish(program)
    assert ended.code == 130 and ended.output.splitlines()[-1].endswith(f"step_00000{saved}"), ended.output[-3000:]
    assert names(ppo)[-1] == f"step_00000{saved}" and ended.metrics[-1]["step"] == saved
    module.write_text("")
    done = ppo.run(*SETTINGS, f"algorithm.custom_module={module}")
    for one, other in zip(whole.metrics, done.metrics, strict=True):
        for name in ("step", "critic/score/mean", "actor/loss", "actor/grad_norm", "data/prompts_consumed"):
            assert one.get(name) == other.get(name), (one["step"], name)
    first, second = ((run.folder / "model/model.safetensors").read_bytes() for run in (whole, done))
    assert first == second


def test_flipped_bit_is_named_and_the_previous_checkpoint_is_used(ppo: Runner) -> None:
    here = (*SETTINGS[:2], "trainer.val_before_train=False", "trainer.save_freq=1")
    done = ppo.run(*here)
    (file,) = (done.folder / "checkpoints/step_000002/policy/model").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = ppo.run(*here, "trainer.total_training_steps=3")
    assert f"step_000002: policy/model/{file.name} has changed" in " ".join(again.output.split()), again.output
    assert [metrics["step"] for metrics in again.metrics] == [0, 1, 2, 3]
    assert "resumes from" in again.output and (again.folder / "checkpoints/step_000003").is_dir()
