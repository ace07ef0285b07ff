"""Middleware of the server of `alphaapollo serve`."""

from __future__ import annotations

import json
from contextlib import suppress

from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response


async def drop_empty_tools(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Remove an empty list of tools, for which vLLM's Anthropic API would need a parser of tool calls."""
    if request.url.path.startswith("/v1/messages"):
        with suppress(ValueError):  # no JSON, which the API refuses
            values = json.loads(await request.body() or b"null")
            if isinstance(values, dict) and values.get("tools") == []:
                del values["tools"]
                request._body = json.dumps(values).encode()  # what the API reads
    return await call_next(request)
