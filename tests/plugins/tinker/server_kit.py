"""The server of tinker_server with fake verbs, and a client."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from alphaapollo.own_loop.rows import GradientResult
from alphaapollo.plugins.tinker.app import build_app
from alphaapollo.plugins.tinker.server import ServedModel, Server
from alphaapollo.plugins.tinker.store import CheckpointStore
from alphaapollo.plugins.tinker.wire import PROTO

SECONDS = 60  # deadline
KEYS = ("tml-one", "tml-two")
OWNER = hashlib.sha256(KEYS[0].encode()).hexdigest()[:16]
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")


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
