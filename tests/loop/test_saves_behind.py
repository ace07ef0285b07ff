"""Background checkpoints: interrupted while they are written, and damaged later."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.loop.conftest import FinishedRun, Runner, Task
from tests.loop.replays import check_equal_runs
from tests.loop.stack import StackRunner
from tests.loop.warm import Program

SETTINGS = (
    *("actor_rollout_ref.rollout.name=fake", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=null"),
    *("trainer.val_before_train=False", "trainer.total_training_steps=6"),
)
LOCAL = "trainer.controller=local"
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


@pytest.fixture(scope="module")
def whole(task: Task, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An uninterrupted run."""
    return StackRunner(task, tmp_path_factory.mktemp("whole")).run(*SETTINGS)


def held(ppo: Runner, release: Path) -> Program:
    """Start a run that trains one more iteration while the write of its second checkpoint is blocked."""
    module = ppo.out / "hold.py"
    module.write_text(HOLD.format(release=str(release)))
    program = ppo.start(*SETTINGS, LOCAL, f"algorithm.custom_module={module}")
    metrics = ppo.out / "test/run/metrics.jsonl"
    program.wait_for(lambda: metrics.exists() and '"step": 5' in metrics.read_text())
    assert (ppo.out / "test/run/checkpoints/.writing_step_000004").is_dir()
    assert names(ppo) == ["step_000002"]
    return program


def names(ppo: Runner) -> list[str]:
    return sorted(path.name for path in (ppo.out / "test/run/checkpoints").glob("step_*"))


@pytest.mark.core
def test_kill_during_write_resumes_from_the_previous_checkpoint(
    ppo: Runner, tmp_path: Path, whole: FinishedRun
) -> None:
    assert "written while the next one runs" in " ".join(whole.output.split())
    program = held(ppo, tmp_path / "release")
    program.signal(signal.SIGKILL)
    program.wait()
    (tmp_path / "release").touch()
    done = ppo.run(*SETTINGS, LOCAL, f"algorithm.custom_module={ppo.out / 'hold.py'}")
    assert "resumed from" in done.output and "step_000002" in done.output
    assert names(ppo) == ["step_000002", "step_000004", "step_000006"]
    assert list((done.folder / "checkpoints").glob(".*")) == []
    check_equal_runs(whole, done)
    written = {name for run in (whole, done) for line in run.metrics for name in line if name.startswith("checkpoint/")}
    assert written == {"checkpoint/write_seconds"}


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
def test_sigterm_saves_the_last_complete_iteration(
    ppo: Runner, tmp_path: Path, whole: FinishedRun, part: str, saved: int
) -> None:
    """SIGTERM in the fourth iteration, before and during its update. The resumed run equals an uninterrupted run."""
    mark, module = tmp_path / "in_step_4", tmp_path / "pause.py"
    module.write_text(PAUSE.format(part=part, mark=str(mark)))
    program = ppo.start(*SETTINGS, LOCAL, "trainer.save_on_signal=true", f"algorithm.custom_module={module}")
    program.wait_for(mark.exists)
    program.signal(signal.SIGTERM)
    ended = ppo.finish(program)
    assert ended.code == 130 and ended.output.splitlines()[-1].endswith(f"step_00000{saved}"), ended.output[-3000:]
    assert names(ppo)[-1] == f"step_00000{saved}" and ended.metrics[-1]["step"] == saved
    module.write_text("")
    check_equal_runs(whole, ppo.run(*SETTINGS, LOCAL, f"algorithm.custom_module={module}"))
