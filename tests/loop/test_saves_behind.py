"""Checkpoints at SIGTERM. test_main_sft.py kills a run while it writes one, and test_deaths.py damages one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.loop.conftest import FinishedRun, Runner, Task
from tests.loop.replays import check_equal_runs
from tests.loop.stack import StackRunner

SETTINGS = (
    *("actor_rollout_ref.rollout.name=fake", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=null"),
    *("trainer.val_before_train=False", "trainer.total_training_steps=6"),
)
LOCAL = "trainer.controller=local"


@pytest.fixture(scope="module")
def whole(task: Task, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An uninterrupted run."""
    return StackRunner(task, tmp_path_factory.mktemp("whole")).run(*SETTINGS)


def names(ppo: Runner) -> list[str]:
    return sorted(path.name for path in (ppo.out / "test/run/checkpoints").glob("step_*"))


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
