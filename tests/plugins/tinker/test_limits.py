"""What one API key may use, and its checkpoints: limits, kills, and requests of web pages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.plugins.tinker.json_requests import LoraConfig
from alphaapollo.plugins.tinker.store import CheckpointStore, ModelRecord, get_partial
from tests.plugins.tinker.server_kit import KEYS, OWNER, SECONDS, Client, run_with_client


def test_model_limit(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        session = await client.open_session()
        created = [await client.create(session, number) for number in range(3)]  # at a time
        assert [one.status_code for one in created] == [200, 200, 429] and "--max-models" in created[2].text
        for one in created[:2]:
            await client.retrieve(one.json()["request_id"])
        assert (await client.create(await client.open_session())).status_code == 429
        assert await client.create_and_wait(await client.open_session(KEYS[1]), key=KEYS[1])
        await client.server.end_session(session)
        assert await client.create_and_wait(await client.open_session())

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
    monkeypatch.setattr("alphaapollo.plugins.tinker.budget.MAX_BYTES", 40_000)

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
    monkeypatch.setattr("alphaapollo.plugins.tinker.app.BODY_SECONDS", 0.2)
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
