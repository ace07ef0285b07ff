"""HTTP server that answers like vLLM, with log-probs that tests work out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = dict[str, Any] | int  # body, or status of an error; -N: status 429 and Retry-After: N


@asynccontextmanager
async def serve(answer: Callable[[str, dict[str, Any]], Answer]) -> AsyncIterator[str]:
    """Serve `answer(path, request)` on a free port. Yields the base_url."""

    async def handle(request: web.Request) -> web.Response:
        found = answer(request.path, await request.json())
        await asyncio.sleep(0)
        if not isinstance(found, int):
            return web.json_response(found)
        status, headers = (found, {}) if found > 0 else (429, {"Retry-After": str(-found)})
        return web.json_response({"error": "busy"}, status=status, headers=headers)

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


def make_completion(prompt: list[int], top: dict[int, float]) -> Answer:
    """Completion in which each prompt token t has the log-prob -t / 10, beside the given most probable tokens."""
    scores = [{str(one): {"logprob": value} for one, value in {token: -token / 10, **top}.items()} for token in prompt]
    return {"choices": [{"text": "", "prompt_logprobs": [None, *scores[1:]]}]}
