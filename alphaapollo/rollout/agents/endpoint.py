"""HTTP endpoint of a rollout worker: programs of sessions call the policy like a model provider.

    client -> uvicorn (loopback) -> SessionGate -> the engine's HTTP API

The API key of a request selects its session. Keys are random, so a program cannot read another session. Requests with
the key of evaluation suites belong to no session, and reach the engine unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from alphaapollo.config.schema import Env
from alphaapollo.engines.http_api import CURRENT_REQUEST, HttpApiSettings
from alphaapollo.engines.protocol import EngineError
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.rewards.base import convert_to_float
from alphaapollo.rollout.agents.session import AgentSession, Request
from alphaapollo.types import JsonObject

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

COMPLETIONS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
OTHER_ROUTES = ("/v1/models", "/v1/messages/count_tokens")
REWARDS = "/v1/rewards"
KEY_HEADER = "x-reward-key"
MAX_BODY = 16 << 20  # bytes
MAX_WAITING_CONNECTIONS = 2048
KEEP_ALIVE_SECONDS = 24 * 3600  # a connection stays open while its program runs tools
CLOSE_SECONDS = 5.0  # time limit to close open connections
NEUTRAL_SAMPLING = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


AroundRequest = Callable[[Request, Callable[[], Awaitable[None]]], Awaitable[None]]
"""`around(request, answer)`: answer a request for a completion with `await answer()`."""


async def answer_request(request: Request, answer: Callable[[], Awaitable[None]]) -> None:
    await answer()


class HttpError(Exception):
    """Error that is sent to the client in the format of its API."""

    def __init__(self, status: int, kind: str, message: str):
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class _OpenSession:
    session: AgentSession
    time_limit: TimeLimit
    tasks: set[asyncio.Task[object]] = field(default_factory=set)  # running requests


class SessionGate:
    """ASGI application that finds the session of a request and forwards the request to the engine's HTTP API."""

    def __init__(self, app: ASGIApp, around: AroundRequest = answer_request):
        self._app, self._around = app, around
        self.suite_key = secrets.token_urlsafe()  # API key of evaluation suites
        self._sessions: dict[str, _OpenSession] = {}  # by API key

    @contextlib.contextmanager
    def open_session(self, session: AgentSession, time_limit: TimeLimit) -> Iterator[None]:
        """Context manager during which the session's requests are accepted. At its end, running ones are cancelled.

        time_limit: time limit of the program, which does not count the time of its requests.
        """
        opened = self._sessions[session.token] = _OpenSession(session, time_limit)
        try:
            yield
        finally:
            del self._sessions[session.token]
            for task in opened.tasks:
                task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                await self._serve(scope, receive, send)
        except (ConnectionError, EngineError):
            raise  # the client is gone; the session reports an engine that failed
        except Exception:
            logger.exception("a request of an agent failed")
            raise

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            if headers.get("authorization") == f"Bearer {self.suite_key}":
                await self._app(scope, receive, send)
                return
            opened = self._find_session(headers)
            if path not in (*COMPLETIONS, *OTHER_ROUTES, REWARDS):
                known = ", ".join((*COMPLETIONS, *OTHER_ROUTES, REWARDS))
                raise HttpError(404, "not_found_error", f"Unknown route {path}. Use one of: {known}.")
            body = await _read_body(receive, headers)
            task = asyncio.current_task()
            assert task is not None
            opened.tasks.add(task)
            try:
                if path == REWARDS:
                    _give_reward(opened.session, headers, body)
                    await _send_json(send, 200, {})
                elif path in COMPLETIONS and scope["method"] == "POST":
                    with opened.time_limit.exclude():
                        await self._serve_completion(opened.session, scope, headers, body, receive, send)
                else:
                    await self._app(scope, _replay_body(body, receive), send)
            finally:
                opened.tasks.discard(task)
        except HttpError as error:
            shown = {"type": error.kind, "message": str(error)}
            message = {"error": shown | {"code": error.kind, "param": None}}
            await _send_json(
                send, error.status, {"type": "error", "error": shown} if path.startswith("/v1/messages") else message
            )

    def _find_session(self, headers: dict[str, str]) -> _OpenSession:
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key not in self._sessions:
            message = "Unknown API key. A key is valid for one session, until its program has returned its reward."
            raise HttpError(401, "authentication_error", message)
        return self._sessions[key]

    async def _serve_completion(
        self, session: AgentSession, scope: Scope, headers: dict[str, str], body: bytes, receive: Receive, send: Send
    ) -> None:
        if "x-reward" in headers:
            message = f"The header x-reward gives no reward. Use endpoint.reward, or POST {REWARDS} after the answer."
            raise HttpError(400, "invalid_request_error", message)
        fields = _read_fields(body)
        request = Request(
            session,
            body_digest=hashlib.blake2b(scope["path"].encode() + body).hexdigest(),
            role=headers.get("x-role", ""),
            is_retry=headers.get("x-stainless-retry-count", "0") != "0",
        )
        wanted = fields.get("n")
        try:
            session.count_request(request, max(1, wanted) if isinstance(wanted, int) else 1)
        except ValueError as error:
            raise HttpError(403, "permission_error", str(error)) from error
        _note_overridden_sampling(session, fields)
        is_finished = False

        async def send_and_watch(message: Message) -> None:
            nonlocal is_finished
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last:  # afterwards, the client may already send its next request
                request.finish(is_delivered=not await _is_disconnected(receive))
                is_finished = True
            await send(message)

        token = CURRENT_REQUEST.set(request)
        try:
            await self._around(request, lambda: self._app(scope, _replay_body(body, receive), send_and_watch))
        finally:
            CURRENT_REQUEST.reset(token)
            if not is_finished:
                request.finish(is_delivered=False)


class EndpointServer:
    """HTTP server of a SessionGate on a free port of the loopback interface."""

    def __init__(self, gate: SessionGate):
        self.gate = gate
        self._gate_server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        # With this protocol, asyncio sends small packets at once (TCP_NODELAY) instead of after up to 40 ms.
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)

    async def start(self) -> None:
        """Start the server."""
        import uvicorn

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:  # signals belong to the process that hosts this server
                yield

        self._socket.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            self.gate,
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=MAX_WAITING_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # SessionGate logs unexpected errors
        self._gate_server = Server(config)
        self._serving = asyncio.create_task(self._gate_server.serve(sockets=[self._socket]))
        while not self._gate_server.started:
            await asyncio.sleep(0.01)

    @property
    def url(self) -> str:
        """URL without a path, e.g. http://127.0.0.1:41234."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def close(self) -> None:
        """Stop the server and close its connections. Idempotent."""
        if self._gate_server is not None and self._serving is not None:
            self._gate_server.should_exit = self._gate_server.force_exit = True
            await asyncio.wait((self._serving,), timeout=CLOSE_SECONDS)
        self._socket.close()


class HttpEngine(Protocol):
    """Engine with an HTTP API."""

    def build_http_app(self, settings: HttpApiSettings) -> ASGIApp: ...


@contextlib.asynccontextmanager
async def open_endpoint(
    engine: HttpEngine,
    env: Env,
    template_arguments: Mapping[str, object],
    allow_image_urls: bool = False,
    around: AroundRequest = answer_request,
) -> AsyncIterator[EndpointServer]:
    """Context manager that serves an engine over HTTP. Raises ValueError if a parser does not exist.

    template_arguments: data.apply_chat_template_kwargs. allow_image_urls: data.allow_image_urls.
    """
    agent = env.agent
    settings = HttpApiSettings(env.tool_parser, agent.reasoning_parser, template_arguments, allow_image_urls)
    app = await asyncio.to_thread(engine.build_http_app, settings)
    server = EndpointServer(SessionGate(app, around))
    try:
        await server.start()
        yield server
    finally:
        await server.close()


async def _read_body(receive: Receive, headers: dict[str, str]) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client closed the connection before its request was complete")
        size += len(message.get("body", b""))
        if max(size, int(headers.get("content-length", "0"))) > MAX_BODY:
            raise HttpError(
                413, "request_too_large", f"The body has more than {MAX_BODY >> 20} MiB. Send a shorter chat."
            )
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


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
        return task.result()["type"] == "http.disconnect"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False


async def _send_json(send: Send, status: int, content: JsonObject) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def _give_reward(session: AgentSession, headers: dict[str, str], body: bytes) -> None:
    """Raise HttpError unless the reward comes from the program itself, not from a command that a model wrote."""
    if not secrets.compare_digest(headers.get(KEY_HEADER, "").encode(), session.reward_key.encode()):
        raise HttpError(403, "permission_error", f"Rewards need the header {KEY_HEADER} with endpoint.reward_key.")
    try:
        fields = json.loads(body)
        session.give_reward(str(fields["request_id"]), convert_to_float(float(fields["reward"]), "reward"))
    except (KeyError, TypeError, ValueError) as error:
        fix = 'Send {"request_id": the id of an answer, "reward": a number}.'
        session.refused_reward = f"{error} {fix}"  # no valid reward, also if the program ignores the error
        raise HttpError(400, "invalid_request_error", session.refused_reward) from error


def _read_fields(body: bytes) -> JsonObject:
    """Return the JSON object of a body; an empty one if there is none, which the engine's HTTP API reports."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _note_overridden_sampling(session: AgentSession, fields: JsonObject) -> None:
    """Record the client's sampling settings that differ from the policy's, which are used instead."""
    own = session.sampling
    policy = {"temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k, **NEUTRAL_SAMPLING}
    for key, value in policy.items():
        if fields.get(key) not in (None, value):
            session.overridden[key] = fields[key]
    if fields.get("tools") and fields.get("parallel_tool_calls") is False:
        session.overridden["parallel_tool_calls"] = False
