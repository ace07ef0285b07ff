"""Server with a small engine, for tests of the remote engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from alphaapollo.engines.process import set_up_engine_process
from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.remote import receive_spec, serve
from alphaapollo.engines.types import EngineDied, EngineError
from alphaapollo.engines.weight_sync.transport import WeightReceipt
from alphaapollo.processes.host import reserve_stdin_and_stdout
from alphaapollo.types import Completion, ImageInput, Sampling, StopReason

FAILURES = {1: ValueError("wrong"), 2: EngineError("broken"), 3: EngineDied("dead"), 4: KeyError("unexpected")}


class EchoEngine(Engine):
    cancelled = 0

    async def start(self) -> None:
        if os.environ.get("ECHO_FAILS"):
            os._exit(3)

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        return Completion(token_ids, [-1.0] * len(token_ids), StopReason.STOP, 0)

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        raise FAILURES[token_ids[0]]

    async def pause(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            EchoEngine.cancelled += 1

    async def resume(self) -> None:
        os._exit(1)

    async def confirm_weights(self, version: int) -> WeightReceipt:
        return WeightReceipt(version, str(self.cancelled))

    def get_progress_counter(self) -> int:
        return 42


def main() -> None:
    pipes = reserve_stdin_and_stdout()
    set_up_engine_process()
    asyncio.run(serve(EchoEngine(receive_spec()), *pipes))
