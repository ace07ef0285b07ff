"""Engine in a process of its own: calls, errors, cancellation, death and the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from alphaapollo.engines.remote import RemoteEngine
from alphaapollo.engines.types import EngineDied, EngineError
from alphaapollo.types import Sampling
from tests.processes import is_running
from tests.unit.engines.specs import make_spec


def make_engine(folder: Path, python: str = sys.executable, **environment: str) -> RemoteEngine:
    spec = make_spec(max_model_len=64, log_path=str(folder / "logs/engine.log"))
    return RemoteEngine(spec, Path(python), "tests.unit.engines.echo_server", environment)


def run(engine: RemoteEngine, use: Callable[[RemoteEngine], Awaitable[None]]) -> None:
    async def start_and_use() -> None:
        try:
            await engine.start()
            await use(engine)
        finally:
            await engine.close()

    asyncio.run(start_and_use())


def test_calls_and_errors(tmp_path: Path) -> None:
    pids: list[int] = []

    async def use(engine: RemoteEngine) -> None:
        pids.extend(engine.list_pids())
        answers = await asyncio.gather(*(engine.generate([n], Sampling(1), "r") for n in range(20)))
        assert [answer.token_ids for answer in answers] == [[n] for n in range(20)]
        for number, kind, text in ((1, ValueError, "wrong"), (2, EngineError, "broken"), (3, EngineDied, "dead")):
            with pytest.raises(kind, match=text):
                await engine.log_probs([number])
        with pytest.raises(EngineError, match="KeyError: 'unexpected'"):
            await engine.log_probs([4])
        with pytest.raises(ValueError, match="64"):
            await engine.generate([1], Sampling(64), "too long")
        while engine.get_progress_counter() != 42:
            await asyncio.sleep(0)

    run(make_engine(tmp_path), use)
    assert "Traceback" in (tmp_path / "logs/engine.log").read_text()  # of the unexpected error
    assert len(pids) == 1 and not is_running(pids[0])


def test_a_cancelled_call_is_cancelled_in_the_server(tmp_path: Path) -> None:
    async def use(engine: RemoteEngine) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.pause(), 0.01)
        while (await engine.confirm_weights(5)).digest != "1":
            await asyncio.sleep(0)

    run(make_engine(tmp_path), use)


def test_death_of_the_server_fails_all_calls(tmp_path: Path) -> None:
    async def use(engine: RemoteEngine) -> None:
        ends = await asyncio.gather(engine.pause(), engine.resume(), return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDied, EngineDied], ends
        assert "rollout engine 0" in str(ends[0]) and "engine.log" in str(ends[0])
        with pytest.raises(EngineDied):
            await engine.generate([1], Sampling(1), "late")

    run(make_engine(tmp_path), use)


def test_a_dead_server_starts_again(tmp_path: Path) -> None:
    async def use(engine: RemoteEngine) -> None:
        assert not engine.is_dead
        with pytest.raises(EngineDied):
            await engine.resume()
        assert engine.is_dead
        await engine.restart()
        assert not engine.is_dead
        with pytest.raises(EngineDied, match="no weights"):
            await engine.generate([1], Sampling(1), "early")
        await engine.confirm_weights(5)
        assert (await engine.generate([1], Sampling(1), "late")).token_ids == [1]

    run(make_engine(tmp_path), use)


def test_a_server_that_does_not_start_is_no_death(tmp_path: Path) -> None:
    """A restart would fail again."""
    for engine in (make_engine(tmp_path, ECHO_FAILS="1"), make_engine(tmp_path, python=str(tmp_path / "missing"))):
        with pytest.raises(EngineError, match="rollout engine 0 did not start") as raised:
            run(engine, lambda _: asyncio.sleep(0))
        assert raised.type is EngineError
