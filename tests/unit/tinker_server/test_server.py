"""Sessions, queues and limits of tinker_server with fake verbs."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaapollo.session.rows import GradientResult
from alphaapollo.tinker_server import server as server_module
from alphaapollo.tinker_server.app import build_app
from alphaapollo.tinker_server.budget import Budget
from alphaapollo.tinker_server.calls import CallQueue, Futures
from alphaapollo.tinker_server.json_requests import LoraConfig
from alphaapollo.tinker_server.server import ServedModel, Server
from alphaapollo.tinker_server.store import CheckpointStore, ModelRecord, get_partial
from alphaapollo.tinker_server.wire import PROTO, RequestError

SECONDS = 60  # deadline
KEYS = ("tml-one", "tml-two")
OWNER = hashlib.sha256(KEYS[0].encode()).hexdigest()[:16]
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")


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


def test_a_queue_closes_after_its_running_call() -> None:
    async def run() -> None:
        futures, release, ran = Futures(), asyncio.Event(), list[int]()
        queue = CallQueue("model", futures, pytest.fail, Budget(1))

        async def first() -> None:
            await release.wait()
            ran.append(1)

        async def second() -> None:
            ran.append(2)

        queue.put(0, first)
        queue.put(1, second)
        await asyncio.sleep(0)
        closing = asyncio.create_task(queue.close())
        await asyncio.sleep(0)
        assert not closing.done()
        release.set()
        await closing
        assert ran == [1]
        futures.drop("model:")
        with pytest.raises(RequestError, match="model:1"):
            await futures.wait("model:1", 0)

    asyncio.run(run())


# The server with fake verbs.


class FakeVerbs:
    """Verbs that note their names and adapters. A folder of an adapter has 1000 bytes."""

    def __init__(self) -> None:
        self.calls = list[tuple[str, str]]()
        self.adapters = set[str]()

    async def add_adapter(self, name: str, *_: Any) -> None:
        self.adapters.add(name)

    async def remove_adapter(self, name: str) -> None:
        self.adapters.remove(name)

    async def forward_backward(self, rows: Any, loss: Any, denominator: float, adapter: str) -> GradientResult:
        self.calls.append(("forward_backward", adapter))
        return GradientResult(1.0, 1, [np.zeros(len(row.token_ids), np.float32) for row in rows], {})

    async def optim_step(self, *_: Any, adapter: str) -> dict[str, float]:
        self.calls.append(("optim_step", adapter))
        return {"grad_norm": 1.0, "lr": 0.1}

    async def clear_gradients(self, adapter: str) -> None:
        self.calls.append(("clear_gradients", adapter))

    async def save_adapter(self, adapter: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(1000))

    async def publish(self, adapter: str, folder: Path) -> None:
        await self.save_adapter(adapter, folder)

    async def sample_tokens(self, *_: Any) -> Any:
        self.calls.append(("sample_tokens", ""))
        await asyncio.Event().wait()


class Client:
    """Sends requests to the application of a server."""

    def __init__(
        self, verbs: FakeVerbs, root: Path, max_models: int = 4, max_bytes: int = 10**6, keys: Sequence[str] = KEYS
    ):
        served = ServedModel("base", "base", 64, 8, max_models, (1,), LAYERS)
        self.verbs, self.printed = verbs, list[str]()
        self.store = CheckpointStore(root, max_bytes)
        self.server = Server(cast(Any, verbs), self.store, served, self.printed.append)
        transport = httpx.ASGITransport(build_app(self.server, keys, ["server"]))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/")

    async def post(
        self, endpoint: str, content: bytes | None = None, key: str = KEYS[0], **body: Any
    ) -> httpx.Response:
        data = json.dumps({"type": endpoint, **body}).encode() if content is None else content
        return await self._http.post(endpoint, content=data, headers={"x-api-key": key})

    async def open_session(self, key: str = KEYS[0]) -> str:
        answer = await self.post("create_session", key=key, tags=[], sdk_version="0.38.0")
        return str(answer.json()["session_id"])

    async def create(self, session_id: str, number: int = 0, key: str = KEYS[0]) -> httpx.Response:
        config = {"rank": 4, "seed": 1}
        names: dict[str, Any] = {"session_id": session_id, "model_seq_id": number}
        return await self.post("create_model", key=key, base_model="base", lora_config=config, **names)

    async def create_and_wait(self, session_id: str, number: int = 0, key: str = KEYS[0]) -> str:
        answer = await self.create(session_id, number, key)
        result = await self.retrieve(answer.json()["request_id"], key)
        return str(result.json()["model_id"])

    async def retrieve(self, request_id: str, key: str = KEYS[0]) -> httpx.Response:
        return await asyncio.wait_for(self.post("retrieve_future", key=key, request_id=request_id), SECONDS)

    async def find_error(self, request_id: str) -> str:
        answer = (await self.retrieve(request_id)).json()
        assert answer["category"] == "user", answer
        return str(answer["error"])

    async def step(self, model_id: str, number: int, **adam: float) -> httpx.Response:
        return await self.post("optim_step", model_id=model_id, seq_id=number, adam_params=adam)

    async def save(self, model_id: str, number: int, name: str, key: str = KEYS[0]) -> str:
        """Save, and return the path or the error."""
        answer = await self.post("save_weights", key=key, model_id=model_id, seq_id=number, path=name)
        result = (await self.retrieve(answer.json()["request_id"], key)).json()
        return str(result.get("path") or result["error"])

    async def send_datum(self, model_id: str, number: int, weight: float = 1.0) -> httpx.Response:
        message = PROTO.ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
        arrays = ("target_tokens", np.array([6, 7]), 2), ("weights", np.full(2, weight, np.float32), 1)
        for name, values, dtype in arrays:
            datum.loss_fn_inputs.add(key=name, value=PROTO.Tensor(dense=values.tobytes(), dtype=dtype))
        return await self.post("forward_backward", message.SerializeToString())


def run_with_client(test: Callable[[Client], Awaitable[None]], root: Path, **limits: Any) -> Client:
    async def run() -> Client:
        client = Client(FakeVerbs(), root, **limits)
        await test(client)
        return client

    return asyncio.run(run())


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


def test_model_limit(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        session = await client.open_session()
        for number in (0, 1):
            await client.create_and_wait(session, number)
        refused = await client.create(await client.open_session())
        assert refused.status_code == 429 and "--max-models" in refused.text
        assert await client.create_and_wait(await client.open_session(KEYS[1]), key=KEYS[1])
        await client.server.end_session(session)
        assert await client.create_and_wait(await client.open_session())

    run_with_client(test, tmp_path, max_models=2)


def test_models_that_are_created_at_a_time_count(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        session = await client.open_session()
        codes = [(await client.create(session, number)).status_code for number in range(4)]
        assert codes == [200, 200, 429, 429]

    run_with_client(test, tmp_path, max_models=2)


def test_storage_limit(tmp_path: Path) -> None:
    """The checkpoints of a key count, until they are deleted."""

    async def test(client: Client) -> None:
        model_id = await client.create_and_wait(await client.open_session())
        paths = [await client.save(model_id, number, f"s{number}") for number in (1, 2, 3)]
        assert [path.startswith("tinker://") for path in paths] == [True, True, False]
        assert "delete_checkpoint" in paths[2]
        other = await client.create_and_wait(await client.open_session(KEYS[1]), key=KEYS[1])
        assert (await client.save(other, 1, "s", KEYS[1])).startswith("tinker://")
        answer = await client._http.delete(
            f"training_runs/{model_id}/checkpoints/weights/s1", headers={"x-api-key": KEYS[0]}
        )
        assert answer.status_code == 200
        assert (await client.save(model_id, 4, "s4")).startswith("tinker://")

    run_with_client(test, tmp_path, max_bytes=2000)


def test_requests_and_results_count_in_the_budget_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that are read, calls that wait, and results that were not retrieved. Nothing is left after the session."""
    monkeypatch.setattr("alphaapollo.tinker_server.budget.MAX_BYTES", 40_000)

    async def test(client: Client) -> None:
        session = await client.open_session()
        model_id, budget = await client.create_and_wait(session), client.server.budgets[OWNER]

        async def send_until_refused(number: int) -> int:
            """Return the number of the call that gets 429."""
            while (answer := await client.send_datum(model_id, number)).status_code == 200:
                number += 1
            assert answer.status_code == 429
            return number

        last = await send_until_refused(2) - 1  # they wait for 1
        assert (await client.send_datum(model_id, 1)).status_code == 200
        await client.retrieve(f"{model_id}:{last}")
        refused = await send_until_refused(last + 1)
        for number in range(1, refused):
            assert (await client.retrieve(f"{model_id}:{number}")).status_code in (200, 404)
        assert await client.open_session(KEYS[1]) and await send_until_refused(refused) > refused
        await client.server.end_session(session)
        assert budget.size == 0 and not budget.models

    run_with_client(test, tmp_path)


def test_a_body_that_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a time limit, and its bytes count until then."""
    monkeypatch.setattr("alphaapollo.tinker_server.app.BODY_SECONDS", 0.2)
    sizes = list[int]()

    async def test(client: Client) -> None:
        async def send() -> AsyncIterator[bytes]:
            yield bytes(1 << 20)
            sizes.append(client.server.budgets[OWNER].size)
            await asyncio.sleep(SECONDS)

        answer = await client._http.post("forward_backward", content=send(), headers={"x-api-key": KEYS[0]})
        assert answer.status_code == 408 and sizes == [1 << 20] and client.server.budgets[OWNER].size == 0

    run_with_client(test, tmp_path)


def test_without_a_key_web_pages_are_refused(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        for headers, status in (({}, 200), ({"host": "evil.example"}, 400), ({"origin": "http://evil.example"}, 403)):
            assert (await client._http.get("healthz", headers=headers)).status_code == status

    run_with_client(test, tmp_path, keys=())


def test_metadata_is_limited_and_counts(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        model_id = await client.create_and_wait(await client.open_session())
        for number, size in ((1, 5000), (2, 4000)):
            metadata = {"a": "x" * size}
            body: dict[str, Any] = {"model_id": model_id, "seq_id": number, "path": "s", "user_metadata": metadata}
            answer = await client.post("save_weights", **body)
            assert answer.status_code == (200 if number == 2 else 422)
        await client.retrieve(f"{model_id}:2")
        checkpoint = client.store.find(f"{model_id}/weights/s", OWNER)
        assert checkpoint.record.size > 5000 and checkpoint.record.user_metadata == metadata

    run_with_client(test, tmp_path)


class Killed(Exception): ...


@pytest.mark.parametrize("moment", range(4))
def test_a_kill_while_a_checkpoint_is_overwritten(tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each rename, and before the old folder is removed: the next start has the old state or the new one."""
    model = ModelRecord(f"{0:032}:train:0", OWNER, "base", LoraConfig(4), 0.0)
    store, renames = CheckpointStore(tmp_path, 10**9), itertools.count()
    store.add_model(model)
    folder = store.get_folder(model.model_id) / "weights" / "last"

    def save(content: str) -> None:
        get_partial(folder).mkdir(parents=True)
        (get_partial(folder) / "weights").write_text(content)
        store.complete(model, get_partial(folder), 1, None, None)

    save("old")
    for name in ("replace", "rename"):
        real = getattr(Path, name)

        def rename(self: Path, target: Path, real: Any = real) -> Any:
            if next(renames) == moment:
                raise Killed
            return real(self, target)

        monkeypatch.setattr(Path, name, rename)
    with pytest.raises(Killed) if moment < 3 else nullcontext():
        save("new")
    monkeypatch.undo()
    found = CheckpointStore(tmp_path, 10**9).find(f"{model.model_id}/weights/last", OWNER)
    assert (found.folder / "weights").read_text() == ("new" if moment else "old")
    assert [one.name for one in folder.parent.iterdir()] == ["last"]


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
    monkeypatch.setattr("alphaapollo.tinker_server.calls.GAP_SECONDS", 0.01)

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


def test_a_folder_is_removed_after_its_last_request(tmp_path: Path) -> None:
    store, folder = CheckpointStore(tmp_path, 1), tmp_path / "adapter"
    folder.mkdir()
    for _ in range(2):
        store.use(folder)
    store.remove(folder)
    store.release(folder)
    assert folder.is_dir() and not store.exists(folder)
    store.release(folder)
    assert not folder.is_dir()
    store.remove(folder)


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

    run_with_client(test, tmp_path)
