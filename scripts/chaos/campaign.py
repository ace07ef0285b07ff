"""Runs with injected faults, compared with an undisturbed run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.chaos import faults
from scripts.chaos.command import Command
from scripts.chaos.faults import PROGRESS_TIMEOUT, Fault
from scripts.chaos.scenes import SCENES, MemoryTrend, SceneFolders, differences, memory, unaccounted

MAX_STARTS = 60  # of one run
UNDISTURBED = "undisturbed"  # name of the run without faults
RESTARTS = "trainer.max_restarts=1000"


class FaultCampaign:
    """Injects faults into the runs of one scene and collects their outcomes and problems."""

    def __init__(
        self, folders: SceneFolders, rng: random.Random, steps: int, save_freq: int = 2, longest: float = 60.0
    ):
        self.folders, self.rng, self.steps = folders, rng, steps
        self.faults: list[Fault] = []
        self.problems: list[str] = []
        self.memory: dict[str, dict[str, MemoryTrend]] = {}  # by run and metric
        self._round = 0
        self._words = (f"trainer.total_training_steps={steps}", f"trainer.save_freq={save_freq}", RESTARTS)
        self._seconds = longest  # at most between two kills

    def undisturbed(self) -> None:
        """Run the reference for the comparisons."""
        command = Command(self.folders, UNDISTURBED, *self._words)
        self._end_well(command)
        self.memory[UNDISTURBED] = memory(self.folders.folder(UNDISTURBED))
        self._seconds = min(self._seconds, 0.8 * command.seconds)

    def kills(self, count: int, roles: Sequence[str]) -> None:
        """Kill processes at random times, including during startup, alternating over the roles."""
        queue = [roles[number % len(roles)] for number in range(count)]
        self.rng.shuffle(queue)
        while queue:
            self._through(self._killer(queue))

    def soak(self, roles: Sequence[str]) -> None:
        """Kill processes throughout one long run."""
        self._through(self._killer([self.rng.choice(roles) for _ in range(10 * self.steps)]))

    def stops(self, count: int, role: str) -> None:
        left = [role] * count

        def one(command: Command) -> None:
            command.wait_for(lambda: command.steps > 1, PROGRESS_TIMEOUT)
            while left and command.code is None and command.steps < self.steps - 1:  # not during shutdown
                self._sleep(command, 3.0)
                if fault := faults.stop(command, role, self.rng):
                    left.pop()
                    self._note(fault)

        while left:
            self._through(one, "trainer.stall_timeout=60")

    def damages(self, count: int) -> None:
        """Kill the driver, damage a file of its newest checkpoint, and resume with the same command."""
        for _ in range(count):
            name = self._name()
            command = Command(self.folders, name, *self._words)
            folder = self.folders.folder(name) / "checkpoints"
            command.wait_for(partial(two_checkpoints, folder), PROGRESS_TIMEOUT)
            command.kill()
            at, step = command.seconds, command.steps
            how, file = faults.damage(folder, self.rng)
            again = Command(self.folders, name, *self._words)
            self._end_well(again)
            problem = "" if file in again.printed() else f"{how} {file}: not reported"
            self._note(Fault("damage", how, at, step, "reported, resumed", again.seconds, problem))
            self._compare(name)

    def fills(self, count: int) -> None:
        """Fill the disk during the run; with more space, the same command must resume."""
        for _ in range(count):
            name = self._name()
            folder = self.folders.folder(name)
            with faults.small_disk(folder, f"{self.rng.randint(8_000, 12_000)}k") as made:
                if not made:
                    self.problems.append("fill: untested because this user may not mount a file system")
                    return
                command = Command(self.folders, name, *self._words)
                command.wait_for(never, PROGRESS_TIMEOUT * 2)
                said = command.printed()
                is_reported = "free there" in said or "No space left" in said  # of a checkpoint, or of another file
                problem = "" if is_reported else f"not reported: {command.last_line[:200]}"
                fault = Fault("fill", "disk", 0, command.steps, f"exited with {command.code}", command.seconds, problem)
                self._note(fault)
                faults.enlarge(folder, "1g")
                self._end_well(Command(self.folders, name, *self._words))
                self._compare(name)

    def _killer(self, queue: list[str]) -> Callable[[Command], None]:
        def one(command: Command) -> None:
            longest = self._seconds
            while queue and command.code is None:
                self._sleep(command, longest)
                longest = 3.0  # until the next attempt if there was no such process yet
                if command.code is None and (fault := faults.kill(command, queue[-1], self.rng)):
                    queue.pop()
                    self._note(fault)
                    longest = self._seconds

        return one

    def _sleep(self, command: Command, longest: float) -> None:
        """Sleep for a random time while the command runs."""
        command.wait_for(never, self.rng.uniform(0, longest))

    def _through(self, disturb: Callable[[Command], None], *more: str) -> None:
        """Restart one run, with faults, until it is complete; then compare it."""
        name = self._name()
        for _ in range(MAX_STARTS):
            command = Command(self.folders, name, *self._words, *more)
            disturb(command)
            until_end(command)
            if command.code is None:
                command.kill()
                self.problems.append(f"{name}: hangs ({command.log})")
            if left := command.left_over():
                self.problems.append(f"{name}: left behind: {', '.join(left)}")
            if command.code == 0:
                break
        self._compare(name)

    def _compare(self, name: str) -> None:
        folder = self.folders.folder(name)
        if not (folder / "model").is_dir():
            found = ["the run did not complete"]
        elif SCENES[self.folders.scene].exact and self.folders.folder(UNDISTURBED).is_dir():
            found = differences(self.folders.folder(UNDISTURBED), folder)
            if not SCENES[self.folders.scene].same_logprobs:
                found = [one for one in found if one == "the model"] + unaccounted(folder, self.steps)
        else:
            found = unaccounted(folder, self.steps)
        self.problems += [f"{self.folders.scene} {name}: {one}" for one in found]
        print(f"{self.folders.scene} {name}: {'; '.join(found) or 'equal to the undisturbed run'}", flush=True)
        self.memory[name] = memory(folder)
        if not found:
            shutil.rmtree(folder, ignore_errors=True)

    def _end_well(self, command: Command) -> None:
        until_end(command)
        if command.code != 0:
            command.kill()
            raise RuntimeError(f"{command.run} exited with {command.code}: {command.last_line[:300]} ({command.log})")

    def _note(self, fault: Fault) -> None:
        self.faults.append(fault)
        scene = self.folders.scene
        print(
            f"{scene} {fault.kind} {fault.target} at {fault.at:.1f} s, iteration {fault.step}: {fault.outcome} after "
            f"{fault.seconds:.1f} s {fault.problem}",
            flush=True,
        )
        if fault.problem:
            self.problems.append(f"{scene}: {fault.kind} {fault.target}: {fault.problem}")

    def _name(self) -> str:
        self._round += 1
        return f"round_{self._round}"


def until_end(command: Command) -> None:
    """Wait until the command ends or makes no progress for too long."""
    while command.wait_for(faults.makes_progress(command), PROGRESS_TIMEOUT * 2):
        pass


def two_checkpoints(folder: Path) -> bool:
    return len(list(folder.glob("step_*"))) > 1


def never() -> bool:
    return False
