"""A sweep on complete runs: kill -9 of the sweep and of a run, the same command again, halving, table and curves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pandas as pd

from alphaapollo.processes.folder_lock import read_lock_owner
from alphaapollo.runs.command_history import read_history
from tests.loop.conftest import MARK, ROOT, Runner, wait_until_nothing_is_left
from tests.loop.test_main_sft import SftRunner
from tests.loop.warm import Program

NAMES = ["lr=0.001", "lr=0.01"]


def start_sweep(ppo: Runner) -> Program:
    sizes = {key: value for key, value in SftRunner.sizes(ppo, "run").items() if not key.endswith("_name")}  # type: ignore[arg-type]
    words = [*(f"{key}={value}" for key, value in sizes.items() if key != "optim.lr"), "trainer.total_training_steps=4"]
    swept = ["optim.lr=1e-3,1e-2", "--stop-worst-half-at", "2", "--metric", "train/loss"]
    output, environment = ppo.out / f"output_{len(ppo.programs)}.txt", os.environ | {MARK: str(ppo.out)}
    ppo.programs.append(
        Program("alphaapollo.cli.main", ["sweep", "sft", *words, *swept], output, environment, ROOT, warm=True)
    )
    return ppo.programs[-1]


def test_a_sweep_resumes_and_stops_the_worst_half(ppo: Runner) -> None:
    project = ppo.out / "sweep_sft"

    def list_states(name: str) -> list[str]:
        return [one.state for one in read_history(project / name)]

    killed = start_sweep(ppo)
    killed.wait_for(lambda: read_lock_owner(project / NAMES[1]) is not None)
    killed.signal(signal.SIGKILL)
    killed.wait()
    wait_until_nothing_is_left(ppo)
    assert list_states(NAMES[0]) == ["finished"]

    second = start_sweep(ppo)
    second.wait_for(lambda: (project / NAMES[1] / "config.yaml").exists())
    os.kill(read_lock_owner(project / NAMES[1])["pid"], signal.SIGKILL)  # type: ignore[index]
    done = ppo.finish(second)
    assert done.code == 1, done.output
    assert f"{NAMES[1]}: failed after" in done.output and "ended by signal 9 (output: " in done.output
    assert f"{NAMES[0]}: finished after 0:00" not in done.output  # it was complete up to step 2

    third = ppo.finish(start_sweep(ppo))
    assert third.code == 0, third.output
    table = pd.read_csv(project / "sweep.csv")
    assert table["train/loss"].is_monotonic_increasing and len(table) == 2
    assert (project / "sweep.png").stat().st_size > 10_000

    def list_files() -> set[Path]:
        return {*project.rglob("*")}

    before = list_files()
    again = ppo.finish(start_sweep(ppo))
    assert again.code == 0 and "finished after" not in again.output and list_files() == before
    wait_until_nothing_is_left(ppo)
