"""Mock judge: an OpenAI-compatible HTTP server (uvicorn) whose replies a function chooses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

Reply = str | int | bytes | None
"""Text of the judge, status of an error, or complete body."""


class MockJudge:
    """ASGI application. `reply`: from the text of the user message to the reply. `latency`: seconds per request.

    With `barrier`, no request is answered before `barrier` requests have arrived; the test then needs no timing. The
    message `slow` is answered after 0.3 s.
    """

    def __init__(self, reply: Callable[[str], Reply], latency: float = 0.0, barrier: int = 0, slow: str = ""):
        self.reply, self.latency, self.barrier, self.slow = reply, latency, barrier, slow
        self.requests: list[dict[str, Any]] = []
        self.num_in_flight = self.max_in_flight = 0
        self.url = ""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response

        request = await Request(scope, receive).json()
        self.requests.append(request)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        content = request["messages"][-1]["content"]
        await asyncio.sleep(0.3 if content == self.slow else self.latency)
        while len(self.requests) < self.barrier:
            await asyncio.sleep(0.002)
        self.num_in_flight -= 1
        reply = self.reply(content)
        headers = {"retry-after-ms": "5"}
        if isinstance(reply, bytes):
            response: Response = Response(reply, headers={"content-type": "application/json"})
        elif isinstance(reply, int):
            response = JSONResponse({"error": {"message": "slow down"}}, reply, headers)
        else:
            message = {"role": "assistant", "content": reply}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            response = JSONResponse({"id": "1", "object": "chat.completion", "choices": [choice]})
        await response(scope, receive, send)

    @contextlib.contextmanager
    def serve(self) -> Iterator[MockJudge]:
        """Context manager that serves on a free port, in a thread."""
        import uvicorn

        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server = uvicorn.Server(uvicorn.Config(self, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
            listener.close()
