"""Queues and sessions of tinker_server with fake verbs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaapollo.plugins.tinker import server as server_module
from alphaapollo.plugins.tinker.budget import Budget
from alphaapollo.plugins.tinker.calls import CallQueue, Futures
from tests.plugins.tinker.server_kit import SECONDS, Client, run_with_client

# Order of calls.


@given(st.data())
def test_calls_run_once_and_in_order(data: st.DataObject) -> None:
    """Whatever order the numbers arrive in, how often they are repeated, and what runs meanwhile."""
    numbers = data.draw(st.permutations(range(data.draw(st.integers(1, 8)))))
    repeated = data.draw(st.lists(st.sampled_from(numbers), max_size=8))
    arrivals = data.draw(st.permutations([*numbers, *repeated]))
    turns = data.draw(st.lists(st.integers(0, 3), min_size=len(arrivals), max_size=len(arrivals)))
    ran, fails = list[int](), data.draw(st.sets(st.sampled_from(numbers)))

    async def run() -> None:
        futures = Futures()
        queue = CallQueue("model", futures, pytest.fail, Budget(1))

        def make_call(number: int) -> Callable[[], Awaitable[int]]:
            async def call() -> int:
                await asyncio.sleep(0)
                ran.append(number)
                if number in fails:
                    raise ValueError(number)
                return number

            return call

        for number, count in zip(arrivals, turns, strict=True):
            assert queue.put(number, make_call(number)) == f"model:{number}"
            for _ in range(count):
                await asyncio.sleep(0)
        for number in numbers:
            future = await futures.wait(f"model:{number}", SECONDS)
            assert future is not None
            assert future.exception() if number in fails else future.result() == number
        await queue.close()

    asyncio.run(run())
    assert ran == sorted(numbers)


def test_a_silent_session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are saved, its adapters are removed, and its calls are unknown. Another session remains."""

    async def test(client: Client) -> None:
        session, other = await client.open_session(), await client.open_session()
        model_id, other_id = await client.create_and_wait(session), await client.create_and_wait(other)
        for number in (1, 3):
            await client.send_datum(model_id, number)
            await client.step(model_id, number + 1)
        await client.retrieve(f"{model_id}:4")
        client.server.end_silent_sessions()
        assert not client.server._closing and client.verbs.adapters == {model_id, other_id}
        client.server.sessions[session].last_seen -= server_module.SESSION_SECONDS + 1
        client.server.end_silent_sessions()
        await asyncio.gather(*client.server._closing)
        assert client.verbs.adapters == {other_id}
        assert [one.name for one in (tmp_path / model_id / "weights").iterdir()] == ["unsaved_step_000002"]
        assert any(f"{model_id}/weights/unsaved_step_000002" in line for line in client.printed)
        for answer in (await client.step(model_id, 5), await client.retrieve(f"{model_id}:4")):
            assert answer.status_code == 404 and "last saved state" in answer.text
        assert (await client.post("session_heartbeat", session_id=session)).status_code == 410

    run_with_client(test, tmp_path)


def test_repeated_requests_run_once(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        session = await client.open_session()
        assert await client.create_and_wait(session) == await client.create_and_wait(session)
        (model_id,) = client.verbs.adapters
        for send in (client.step, client.send_datum, client.send_datum, client.step):  # 2 arrives before 1
            await send(model_id, 2 if send == client.step else 1)
        await client.retrieve(f"{model_id}:2")
        await client.step(model_id, 2)
        await client.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model="base")
        sample: dict[str, Any] = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 4},
            "sampling_session_id": f"{session}:sample:1",
            "seq_id": 1,
        }
        answers = [await client.post("asample", type="sample", **sample) for _ in range(2)]
        assert answers[0].status_code == 200 and answers[0].json() == answers[1].json()
        await asyncio.sleep(0)
        assert [name for name, _ in client.verbs.calls] == ["forward_backward", "optim_step", "sample_tokens"]
        await client.server.end_session(session)

    run_with_client(test, tmp_path)


def test_a_refused_request_does_not_stop_later_ones(tmp_path: Path) -> None:
    """The client has numbered it. Its error arrives, later calls run, and a step behind a refused forward_backward does
    not."""

    async def test(client: Client) -> None:
        model_id = await client.create_and_wait(await client.open_session())
        answers = [
            await client.step(model_id, 1, beta1=1.5),
            await client.post("save_weights", model_id=model_id, seq_id=2, path="../x"),
            await client.send_datum(model_id, 3),
            await client.send_datum(model_id, 4, weight=np.nan),
            await client.step(model_id, 5, learning_rate=0.1),
            await client.send_datum(model_id, 6),
            await client.step(model_id, 7, learning_rate=0.1),
        ]
        found = []
        for number, (answer, word) in enumerate(zip(answers, REFUSALS, strict=True), start=1):
            text = answer.text
            if answer.status_code == 200:
                text = (await client.retrieve(f"{model_id}:{number}")).text
            found.append(word in text if word else "error" not in text)
        assert all(found), found
        names = [name for name, _ in client.verbs.calls]
        assert names == ["forward_backward", "clear_gradients", "forward_backward", "optim_step"]

    REFUSALS = ("beta1", "path", "", "non-finite", "non-finite", "", "")
    run_with_client(test, tmp_path)


def test_a_session_that_ends_while_a_model_is_created(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        session, release = await client.open_session(), asyncio.Event()
        add = client.verbs.add_adapter

        async def wait(name: str, *arguments: Any) -> None:
            await add(name, *arguments)
            await release.wait()

        client.verbs.add_adapter = wait  # type: ignore[method-assign]
        await client.create(session)
        await asyncio.sleep(0)
        closing = client.server.end_session(session)
        await asyncio.sleep(0)
        assert not closing.done()
        release.set()
        await closing
        assert not client.verbs.adapters and not list(tmp_path.iterdir())


def test_a_call_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls run after some time, and the owner of the queue learns of it."""
    monkeypatch.setattr("alphaapollo.plugins.tinker.calls.GAP_SECONDS", 0.01)

    async def run() -> None:
        futures, gaps = Futures(), list[str]()
        queue = CallQueue("model", futures, gaps.append, Budget(1))

        async def call() -> int:
            return 1

        queue.put(0, call)
        queue.put(2, call)
        future = await futures.wait("model:2", SECONDS)
        assert future is not None and future.result() == 1 and "call 1 did not arrive" in gaps[0]
        await queue.close()

    asyncio.run(run())


def test_an_error_at_the_end_of_a_session_does_not_stop_others(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        session = await client.open_session()
        models = [await client.create_and_wait(session, number) for number in (0, 1)]
        for model_id in models:
            await client.send_datum(model_id, 1)
            await client.step(model_id, 2)
            await client.retrieve(f"{model_id}:2")
        save = client.verbs.save_adapter

        async def fail_once(adapter: str, folder: Path) -> None:
            if adapter == models[0]:
                raise OSError("the disk is full")
            await save(adapter, folder)

        client.verbs.save_adapter = fail_once  # type: ignore[method-assign]
        await client.server.end_session(session)
        assert not client.verbs.adapters and any("the disk is full" in line for line in client.printed)
        assert (tmp_path / models[1] / "weights" / "unsaved_step_000001").is_dir()

    run_with_client(test, tmp_path)
