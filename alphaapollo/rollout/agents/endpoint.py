"""HTTP endpoint of a rollout worker: programs of sessions call the policy like a model provider.

    client -> uvicorn (loopback) -> SessionGate -> the engine's HTTP API

The API key of a request selects its session. Keys are random, so a program cannot read another session. Requests with
the key of evaluation suites belong to no session, and reach the engine unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from alphaapollo.config.schema import Env
from alphaapollo.engines.agent_sessions import CURRENT_REQUEST, AgentSession, Request
from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import MODEL_NAME, EngineError, HttpApiSettings
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.types import JsonObject

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

COMPLETION_ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
ROUTES = (*COMPLETION_ROUTES, "/v1/models", "/v1/messages/count_tokens")
MAX_BODY = 16 << 20  # bytes
MAX_WAITING_CONNECTIONS = 2048
KEEP_ALIVE_SECONDS = 24 * 3600  # a connection stays open while its program runs tools
CLOSE_SECONDS = 5.0  # time limit to close open connections
NEUTRAL_SAMPLING = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}  # no effect
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}

AroundRequest = Callable[[Request, Callable[[], Awaitable[None]]], Awaitable[None]]
"""`around(request, answer)`: answer a request for a completion with `await answer()`."""

_warned: set[str] = set()  # settings about which this process has warned


async def answer_request(request: Request, answer: Callable[[], Awaitable[None]]) -> None:
    await answer()


class HttpError(Exception):
    """Error that is sent to the client in the format of its API."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class SessionGate:
    """ASGI application that finds the session of a request and forwards the request to the engine's HTTP API."""

    def __init__(self, make_app: Callable[[], ASGIApp], around: AroundRequest = answer_request):
        self._make_app, self._around = make_app, around
        self._app = make_app()
        self.url = ""  # without a path, e.g. http://127.0.0.1:41234
        self.suite_key = secrets.token_urlsafe()  # API key of evaluation suites
        self._sessions: dict[str, tuple[AgentSession, TimeLimit, set[asyncio.Task[object]]]] = {}  # by API key

    async def replace_app(self) -> None:
        """Serve the engine's HTTP API over its new process after a restart."""
        self._app = await asyncio.to_thread(self._make_app)

    @contextlib.contextmanager
    def open_session(self, session: AgentSession, time_limit: TimeLimit) -> Iterator[None]:
        """Context manager during which the session's requests are accepted. Requests that run at its end are cancelled.
        time_limit: time limit of the program, which does not count the time of the program's requests."""
        tasks: set[asyncio.Task[object]] = set()  # running requests
        self._sessions[session.token] = session, time_limit, tasks
        try:
            yield
        finally:
            del self._sessions[session.token]
            for task in tasks:
                task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                await self._serve(scope, receive, send)
        except HttpError as error:
            shown: JsonObject = {"type": ERROR_TYPES[error.status], "message": str(error)}
            if scope["path"].startswith("/v1/messages"):
                await _send_json(send, error.status, {"type": "error", "error": shown})
            else:
                await _send_json(send, error.status, {"error": {**shown, "code": shown["type"], "param": None}})
        except (ConnectionError, EngineError):
            raise  # the client is gone; the session reports an engine that failed
        except Exception:
            logger.exception("a request of an agent failed")
            raise

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key == self.suite_key:
            await self._app(scope, receive, send)
            return
        if key not in self._sessions:
            message = "Unknown API key. A key is valid for one session, until its program has returned its reward."
            raise HttpError(401, message)
        session, time_limit, tasks = self._sessions[key]
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            if path not in ROUTES:
                raise HttpError(404, f"Unknown route {path}. Use one of: {', '.join(ROUTES)}.")
            body = await _read_body(receive, headers)
            fields = _read_fields(body)
            _warn_of_overridden_settings(session, fields)
            if fields.get("model") not in (None, MODEL_NAME):  # any name means the policy
                body = json.dumps({**fields, "model": MODEL_NAME}).encode()
            send = _watch_refusals(session, send)
            if path in COMPLETION_ROUTES and scope["method"] == "POST":
                with time_limit.exclude():
                    await self._serve_completion(session, scope, headers, fields, body, receive, send)
            else:
                await self._app(scope, _replay_body(body, receive), send)
        except HttpError as error:
            session.record_refusal(f"{error.status} {error}")
            raise
        finally:
            tasks.discard(task)

    async def _serve_completion(
        self,
        session: AgentSession,
        scope: Scope,
        headers: dict[str, str],
        fields: JsonObject,
        body: bytes,
        receive: Receive,
        send: Send,
    ) -> None:
        request = Request(
            session,
            body_digest=hashlib.blake2b(scope["path"].encode() + body).hexdigest(),
            role=headers.get("x-role", ""),
            is_retry=headers.get("x-stainless-retry-count", "0") != "0",
        )
        num_answers = fields.get("n")
        try:
            session.count_request(request, max(1, num_answers) if isinstance(num_answers, int) else 1)
        except ValueError as error:
            raise HttpError(403, str(error)) from error

        async def send_and_watch(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last:  # afterwards, the client may already send its next request
                request.finish(is_delivered=not await _is_disconnected(receive))
            await send(message)

        token = CURRENT_REQUEST.set(request)
        try:
            await self._around(request, lambda: self._app(scope, _replay_body(body, receive), send_and_watch))
        finally:
            CURRENT_REQUEST.reset(token)
            if request.is_delivered is None:
                request.finish(is_delivered=False)


@contextlib.asynccontextmanager
async def open_endpoint(
    engine: Engine,
    env: Env,
    template_arguments: Mapping[str, object],
    allow_image_urls: bool = False,
    around: AroundRequest = answer_request,
) -> AsyncIterator[SessionGate]:
    """Context manager that serves an engine over HTTP. Raises ValueError if a parser does not exist."""
    agent = env.agent
    settings = HttpApiSettings(env.tool_parser, agent.reasoning_parser, template_arguments, allow_image_urls)
    gate = await asyncio.to_thread(SessionGate, partial(engine.build_http_app, settings), around)
    async with serve_gate(gate):
        yield gate


@contextlib.asynccontextmanager
async def serve_gate(gate: SessionGate) -> AsyncIterator[None]:
    """Context manager that serves a gate on a free port of the loopback interface, and sets its URL."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:  # signals belong to the process that hosts this server
            yield

    config = uvicorn.Config(
        gate,
        http="h11",  # limits headers, unlike httptools
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=MAX_WAITING_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # SessionGate logs unexpected errors
    server = Server(config)
    # With this protocol, asyncio sends small packets at once (TCP_NODELAY) instead of after up to 40 ms.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        gate.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.wait((serving,), timeout=CLOSE_SECONDS)


async def _read_body(receive: Receive, headers: dict[str, str]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client closed the connection before its request was complete")
        body += message.get("body", b"")
        if max(len(body), int(headers.get("content-length", "0"))) > MAX_BODY:
            raise HttpError(413, f"The body has more than {MAX_BODY >> 20} MiB. Send a shorter chat.")
        if not message.get("more_body", False):
            return bytes(body)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that first returns the body that was already read."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body_first() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_body_first


async def _is_disconnected(receive: Receive) -> bool:
    """Return whether the client has closed its connection, without waiting."""
    task = asyncio.ensure_future(receive())
    await asyncio.sleep(0)
    if task.done():
        return bool(task.result()["type"] == "http.disconnect")
    task.cancel()
    await asyncio.wait((task,))
    return False


def _watch_refusals(session: AgentSession, send: Send) -> Send:
    """Return an ASGI `send` that records answers with a status from 400 to 499."""
    status = 0

    async def send_and_record(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        if 400 <= status < 500 and message.get("body"):
            session.record_refusal(f"{status} {message['body'].decode(errors='replace')}")
        await send(message)

    return send_and_record


async def _send_json(send: Send, status: int, content: JsonObject) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def _read_fields(body: bytes) -> JsonObject:
    """Return the JSON object in a body. If the body has none, which the engine's HTTP API reports, return {}."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _warn_of_overridden_settings(session: AgentSession, fields: JsonObject) -> None:
    """Warn once about each setting of a client that the policy's own setting replaces."""
    sampling = session.sampling
    policy: JsonObject = {"model": MODEL_NAME, **NEUTRAL_SAMPLING}
    policy |= {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    if fields.get("tools"):
        policy["parallel_tool_calls"] = True
    for key, value in policy.items():
        if fields.get(key) not in (None, value) and key not in _warned:
            _warned.add(key)
            logger.warning(
                "the agent's requests set %s=%s. The policy's own setting is used instead, because training needs it.",
                key,
                fields[key],
            )
