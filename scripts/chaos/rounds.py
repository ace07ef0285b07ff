"""Runs that are disturbed until they are through, and compared."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.chaos import harms
from scripts.chaos.command import Command
from scripts.chaos.harms import PATIENCE, Harm
from scripts.chaos.scenes import SCENES, Memory, Place, differences, memory, unaccounted

MOST_BEGINNINGS = 60  # of one run: then it does not get through
WHOLE = "whole"  # the undisturbed run
RESTARTS = "trainer.max_restarts=1000"


class Rounds:
    """The rounds of one scene; what was done, and what was not as promised."""

    def __init__(self, place: Place, rng: random.Random, steps: int, save_freq: int = 2, longest: float = 60.0):
        self.place, self.rng, self.steps = place, rng, steps
        self.harms: list[Harm] = []
        self.problems: list[str] = []
        self.memory: dict[str, dict[str, Memory]] = {}  # of each run, of each figure
        self._round = 0
        self._words = (f"trainer.total_training_steps={steps}", f"trainer.save_freq={save_freq}", RESTARTS)
        self._seconds = longest  # between two deaths at most

    def undisturbed(self) -> None:
        """The run that the others are compared with."""
        command = Command(self.place, WHOLE, *self._words)
        self._end_well(command)
        self.memory[WHOLE] = memory(self.place.folder(WHOLE))
        self._seconds = min(self._seconds, 0.8 * command.seconds)

    def kills(self, count: int, roles: Sequence[str]) -> None:
        """Each at an instant of its own, in start-ups, too; roles in turn."""
        queue = [roles[number % len(roles)] for number in range(count)]
        self.rng.shuffle(queue)
        while queue:
            self._through(self._killer(queue))

    def soak(self, roles: Sequence[str]) -> None:
        """One long run, with deaths until it is through."""
        self._through(self._killer([self.rng.choice(roles) for _ in range(10 * self.steps)]))

    def stops(self, count: int, role: str) -> None:
        left = [role] * count

        def one(command: Command) -> None:
            command.wait_for(lambda: command.steps > 1, PATIENCE)
            while left and command.code is None and command.steps < self.steps - 1:  # not in its end
                self._sleep(command, 3.0)
                if harm := harms.stop(command, role, self.rng):
                    left.pop()
                    self._note(harm)

        while left:
            self._through(one, "trainer.stall_timeout=60")

    def damages(self, count: int) -> None:
        """The driver is killed, a file of its newest checkpoint spoiled, and the same command told to go on."""
        for _ in range(count):
            name = self._name()
            command = Command(self.place, name, *self._words)
            folder = self.place.folder(name) / "checkpoints"
            command.wait_for(partial(two_checkpoints, folder), PATIENCE)
            command.kill()
            at, step = command.seconds, command.steps
            how, file = harms.damage(folder, self.rng)
            again = Command(self.place, name, *self._words)
            self._end_well(again)
            problem = "" if file in again.printed() else f"{how} {file}: not named"
            self._note(Harm("damage", how, at, step, "named, went on", again.seconds, problem))
            self._compare(name)

    def fills(self, count: int) -> None:
        """The disk is full in the middle of the run; with more room, the same command goes on."""
        for _ in range(count):
            name = self._name()
            folder = self.place.folder(name)
            with harms.small_disk(folder, f"{self.rng.randint(8_000, 12_000)}k") as made:
                if not made:
                    self.problems.append("fill: untested, for this user may not mount a file system")
                    return
                command = Command(self.place, name, *self._words)
                command.wait_for(never, PATIENCE * 2)
                said = command.printed()
                told = "free there" in said or "No space left" in said  # of a checkpoint, or of another file
                problem = "" if told else f"not told: {command.last_line[:200]}"
                harm = Harm("fill", "disk", 0, command.steps, f"ended with {command.code}", command.seconds, problem)
                self._note(harm)
                harms.enlarge(folder, "1g")
                self._end_well(Command(self.place, name, *self._words))
                self._compare(name)

    def _killer(self, queue: list[str]) -> Callable[[Command], None]:
        def one(command: Command) -> None:
            longest = self._seconds
            while queue and command.code is None:
                self._sleep(command, longest)
                longest = 3.0  # to the next look, where there was no such process yet
                if command.code is None and (harm := harms.kill(command, queue[-1], self.rng)):
                    queue.pop()
                    self._note(harm)
                    longest = self._seconds

        return one

    def _sleep(self, command: Command, longest: float) -> None:
        """Some time, while it runs."""
        command.wait_for(never, self.rng.uniform(0, longest))

    def _through(self, disturb: Callable[[Command], None], *more: str) -> None:
        """One run: begun as often as it takes, disturbed each time, then compared."""
        name = self._name()
        for _ in range(MOST_BEGINNINGS):
            command = Command(self.place, name, *self._words, *more)
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
        folder = self.place.folder(name)
        if not (folder / "model").is_dir():
            found = ["it did not get through"]
        elif SCENES[self.place.scene].exact and self.place.folder(WHOLE).is_dir():
            found = differences(self.place.folder(WHOLE), folder)
        else:
            found = unaccounted(folder, self.steps)
        self.problems += [f"{self.place.scene} {name}: {one}" for one in found]
        print(f"{self.place.scene} {name}: {'; '.join(found) or 'as undisturbed'}", flush=True)
        self.memory[name] = memory(folder)
        if not found:
            shutil.rmtree(folder, ignore_errors=True)

    def _end_well(self, command: Command) -> None:
        until_end(command)
        if command.code != 0:
            command.kill()
            raise RuntimeError(f"{command.run} ended with {command.code}: {command.last_line[:300]} ({command.log})")

    def _note(self, harm: Harm) -> None:
        self.harms.append(harm)
        scene = self.place.scene
        print(
            f"{scene} {harm.what} {harm.whom} at {harm.at:.1f} s, iteration {harm.step}: {harm.became} after "
            f"{harm.seconds:.1f} s {harm.problem}",
            flush=True,
        )
        if harm.problem:
            self.problems.append(f"{scene}: {harm.what} {harm.whom}: {harm.problem}")

    def _name(self) -> str:
        self._round += 1
        return f"round_{self._round}"


def until_end(command: Command) -> None:
    """Or until it has not got on for too long."""
    while command.wait_for(harms.goes_on(command), PATIENCE * 2):
        pass


def two_checkpoints(folder: Path) -> bool:
    return len(list(folder.glob("step_*"))) > 1


def never() -> bool:
    return False
