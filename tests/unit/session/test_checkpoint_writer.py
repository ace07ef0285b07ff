"""Background checkpoints: what waits for them, errors, signals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from alphaapollo.controller.errors import CANCELLED_BY_MONITOR
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.session import checkpoint_writer
from alphaapollo.session.checkpoint_writer import BackgroundCheckpointWriter, run_and_save_on_signal
from alphaapollo.session.progress import Progress
from tests.unit.event_loop import in_event_loop


class Trainer:
    """Trainer that copies immediately and writes when `let` is set. seconds: result of the write, or its error."""

    def __init__(self, name: str, calls: list[str], seconds: float | Exception):
        self.name, self.calls, self.seconds = name, calls, seconds
        self.let = asyncio.Event()

    async def save(self, folder: str) -> None:
        self.calls.append(f"{self.name}.save {Path(folder).parent.name}")

    async def offload(self) -> None:
        self.calls.append(f"{self.name}.rest")

    async def wait_for_save(self) -> float:
        await self.let.wait()
        self.calls.append(f"{self.name}.written")
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return self.seconds


class Case:
    """Inside a running event loop."""

    def __init__(self, folder: Path, policy: float | Exception = 2.0, critic: float | Exception | None = None):
        self.calls: list[str] = []
        self.notices: list[str] = []
        self.policy = Trainer("policy", self.calls, policy)
        self.critic = None if critic is None else Trainer("critic", self.calls, critic)
        trainers = {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})
        self.checkpoints = CheckpointFolder(folder, None)
        self.saving = BackgroundCheckpointWriter(
            self.checkpoints, trainers, self.notices.append, self.release_kv_cache_temporarily
        )

    @asynccontextmanager
    async def release_kv_cache_temporarily(self) -> AsyncIterator[None]:
        self.calls.append("trainers' phase")
        yield
        self.calls.append("engines' phase")

    @property
    def completed(self) -> list[str]:
        return [path.name for path in self.checkpoints.list_completed()]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


FULL = OSError("cannot write the checkpoint .writing_step_000003/policy: no space is left")


@in_event_loop
async def test_only_the_copies_have_a_gpu_phase(tmp_path: Path) -> None:
    case = Case(tmp_path, policy=2.0, critic=3.0)
    assert case.critic
    progress = Progress(step=3, unfinished=[5])
    await case.saving.save(progress)
    assert case.calls == [
        "trainers' phase",
        *("policy.save .writing_step_000003", "policy.rest"),
        *("critic.save .writing_step_000003", "critic.rest"),
        "engines' phase",
    ]
    progress.step = 4
    progress.unfinished.append(6)
    case.policy.let.set()
    assert case.saving.pop_metrics() == {} and case.completed == []
    case.critic.let.set()
    async with case.saving.finish_on_exit():
        pass
    assert case.completed == ["step_000003"]
    assert Progress.read(tmp_path / "step_000003") == Progress(step=3, unfinished=[5])
    assert case.saving.pop_metrics()["checkpoint/write_seconds"] >= 3.0
    assert case.saving.pop_metrics() == {}


@pytest.mark.parametrize("waits", [False, True])
@in_event_loop
async def test_one_checkpoint_at_a_time(case: Case, tmp_path: Path, waits: bool) -> None:
    await case.saving.save(Progress(step=1))
    saving = case.saving.save_and_wait(tmp_path / ".writing_step_000002") if waits else None
    second = asyncio.create_task(saving or case.saving.save(Progress(step=2)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done() and "policy.save .writing_step_000002" not in case.calls
    case.policy.let.set()
    await second
    assert case.calls.index("policy.written") < case.calls.index("policy.save .writing_step_000002")
    assert "step_000001" in case.completed
    assert "checkpoint/write_seconds" in case.saving.pop_metrics()
    async with case.saving.finish_on_exit():
        pass
    assert case.completed == (["step_000001"] if waits else ["step_000001", "step_000002"])


@pytest.mark.parametrize("where", ["pop_metrics", "save", "the end"])
@in_event_loop
async def test_an_error_is_raised_at_the_next_call_and_once(tmp_path: Path, where: str) -> None:
    case = Case(tmp_path, policy=FULL)
    await case.saving.save(Progress(step=3))
    case.policy.let.set()
    await asyncio.wait([case.saving._writing])  # type: ignore[list-item]
    with pytest.raises(OSError, match="step_000003"):
        async with case.saving.finish_on_exit():
            if where == "pop_metrics":
                case.saving.pop_metrics()
            elif where == "save":
                await case.saving.save(Progress(step=4))
    assert case.completed == [] and case.notices == []


@in_event_loop
async def test_write_error_of_the_driver_names_the_checkpoint(case: Case) -> None:
    def finish(folder: Path) -> None:
        raise OSError(28, "No space left on device")  # of fsync, which knows no names

    case.checkpoints.complete_checkpoint = finish  # type: ignore[assignment, method-assign]
    case.policy.let.set()
    with pytest.raises(OSError, match=r"No space left .*step_000003"):
        async with case.saving.finish_on_exit():
            await case.saving.save(Progress(step=3))


@in_event_loop
async def test_an_interrupted_run_waits_for_the_checkpoint(case: Case) -> None:

    async def run() -> None:
        async with case.saving.finish_on_exit():
            await case.saving.save(Progress(step=1))
            await case.saving.save(Progress(step=2))  # waits for the first: there it is interrupted

    task = asyncio.create_task(run())
    while "engines' phase" not in case.calls:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    while not case.notices:
        await asyncio.sleep(0)
    (notice,) = case.notices
    assert "checkpoint of iteration 1 " in notice and not task.done()
    case.policy.let.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert case.completed == ["step_000001"]


@pytest.mark.parametrize(
    ("policy", "patience", "fact"), [(2.0, 0.0, "after 0 s and is discarded"), (FULL, 30.0, str(FULL))]
)
@in_event_loop
async def test_a_failed_run_reports_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: float | Exception, patience: float, fact: str
) -> None:
    monkeypatch.setattr(checkpoint_writer, "FAILED_RUN_SECONDS", patience)
    case = Case(tmp_path, policy)
    with pytest.raises(ZeroDivisionError):
        async with case.saving.finish_on_exit():
            await case.saving.save(Progress(step=3))
            if policy is FULL:
                case.policy.let.set()
            raise ZeroDivisionError
    assert "checkpoint of iteration 3 " in case.notices[-1] and case.notices[-1].endswith(fact)
    assert case.completed == []


# trainer.save_on_signal


class SignalledLoop:
    """A loop that gets a signal in a given part of its second iteration."""

    def __init__(self, folder: Path, phase: str, save_freq: int = 5, error: Exception | None = None):
        self.case = Case(folder)
        self.case.policy.let.set()
        self.phase, self.save_freq, self.error, self.held = phase, save_freq, error, asyncio.Event()
        self.ended: list[int] = []

    async def part(self, step: int, name: str) -> None:
        if step == 2 and name == self.phase:
            self.held.set()
            await asyncio.sleep(0.05)
            if self.error:
                raise self.error

    async def loop(self) -> None:
        progress, saving = Progress(), self.case.saving
        for step in (1, 2, 3):
            await self.part(step, "collect")
            progress.prompts_consumed += 4
            await self.part(step, "reward")
            saving.mark_models_inconsistent()
            await self.part(step, "learn")
            progress.step = step
            self.ended.append(step)
            saving.mark_models_consistent(progress)
            if step % self.save_freq == 0:
                await saving.save(progress)

    async def end(self, by_monitor: bool = False) -> list[str]:
        """Run the loop until it has ended after the signal. Returns the notices."""

        async def run() -> None:
            async with self.case.saving.finish_on_exit():
                await run_and_save_on_signal(self.case.saving, self.loop())

        task = asyncio.ensure_future(run())
        await self.held.wait()
        task.cancel(CANCELLED_BY_MONITOR if by_monitor else None)
        with pytest.raises(asyncio.CancelledError):
            await task
        return self.case.notices


@pytest.mark.parametrize(
    ("phase", "save_freq", "saved"), [("collect", 5, 1), ("reward", 5, 1), ("learn", 5, 2), ("collect", 1, 1)]
)
@in_event_loop
async def test_a_signal_saves_the_last_complete_iteration_once(
    tmp_path: Path, phase: str, save_freq: int, saved: int
) -> None:
    signalled = SignalledLoop(tmp_path, phase, save_freq)
    notices = await signalled.end()
    assert signalled.ended == list(range(1, saved + 1)) and signalled.case.completed == [f"step_00000{saved}"]
    assert signalled.case.calls.count("policy.rest") == 1
    assert Progress.read(tmp_path / signalled.case.completed[0]) == Progress(step=saved, prompts_consumed=4 * saved)
    assert any(f"writing the checkpoint of iteration {saved}" in notice for notice in notices) or save_freq == 1


@in_event_loop
async def test_a_signal_during_the_copy_waits_for_it(tmp_path: Path) -> None:
    signalled = SignalledLoop(tmp_path, "never", save_freq=2)
    save = signalled.case.policy.save

    async def slow(folder: str) -> None:
        signalled.held.set()
        await asyncio.sleep(0.05)
        await save(folder)

    signalled.case.policy.save = slow  # type: ignore[method-assign]
    await signalled.end()
    assert signalled.ended == [1, 2] and signalled.case.completed == ["step_000002"]
    assert signalled.case.calls.count("policy.rest") == 1


@in_event_loop
async def test_a_stalled_run_saves_no_checkpoint(tmp_path: Path) -> None:
    signalled = SignalledLoop(tmp_path, "learn")
    assert await signalled.end(by_monitor=True) == []
    assert signalled.ended == [1] and signalled.case.completed == []


@in_event_loop
async def test_errors_after_a_signal_are_reported(tmp_path: Path) -> None:
    signalled = SignalledLoop(tmp_path, "learn", error=ValueError("a key"))
    assert (await signalled.end())[-1].endswith(": a key") and signalled.case.completed == []

    async def full(folder: str) -> None:
        raise FULL

    signalled = SignalledLoop(tmp_path, "collect")
    signalled.case.policy.save = full  # type: ignore[method-assign]
    assert (await signalled.end())[-1].endswith(str(FULL)) and signalled.case.completed == []
