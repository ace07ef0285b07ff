"""The replay command, for tests of runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.loop.conftest import MARK, ROOT, FinishedRun, Runner
from tests.loop.warm import Program


def replay(ppo: Runner, *words: object) -> FinishedRun:
    """Run the replay command, forked from the warm process."""
    program = Program(
        "alphaapollo.trainer.replay.__main__",
        words,
        output=ppo.out / f"replay_{len(ppo.programs)}.txt",
        environment=os.environ | {MARK: str(ppo.out)},
        folder=ROOT,
        warm=True,
    )
    ppo.programs.append(program)
    return ppo.finish(program)


def recording(done: FinishedRun, step: int) -> Path:
    return done.folder / "recorded" / f"step_{step:06d}"


def equal_lines(done: FinishedRun) -> int:
    """Number of values that are equal to the last bit. Fails if some differ."""
    assert done.code == 0, done.output
    found = re.search(r"\nbit for bit equal: (\d+) of (\d+)\n", done.output)
    assert found and found[1] == found[2], done.output
    return int(found[1])
