"""HTTP of the server: routes, keys, sizes of bodies, and errors as the client reads them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from alphaapollo.plugins.tinker import json_requests
from alphaapollo.plugins.tinker.budget import RETRIED
from alphaapollo.plugins.tinker.server import Server
from alphaapollo.plugins.tinker.store import ModelRecord, format_time
from alphaapollo.plugins.tinker.wire import CLIENT_VERSION, RequestError, decompress
from alphaapollo.utils.json_types import Json, JsonObject

logger = logging.getLogger(__name__)
API, PROTOBUF = "/api/v1/", "application/x-protobuf"
HOLD_SECONDS = 40.0  # of retrieve_future, whose client waits for 45 s and asks again
ENDED = 410  # status with which the client stops its heartbeats
MAX_BODY, MAX_JSON = 64 << 20, 4 << 20  # bytes of forward_backward and of other requests, after decompression
UNCOUNTED = 64 << 10  # bytes of a body that no budget counts, so that results can always be retrieved
BODY_SECONDS = 120.0  # until a body has arrived
LOCAL = "local"  # owner of everything if the server has no keys

T = TypeVar("T", bound=json_requests.Request)
BODIES: dict[str, type[json_requests.Request]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        json_requests.CreateModel,
        json_requests.LoadWeights,
        json_requests.OptimStep,
        json_requests.SaveWeights,
        json_requests.SaveWeightsForSampler,
        json_requests.CreateSamplingSession,
    )
}
"""POST requests whose answer is the result of the server's method of the same name."""


def build_app(server: Server, keys: Collection[str], hosts: Sequence[str]) -> Starlette:
    """Build the application.

    keys: API keys, each of which is an owner; empty: every client is the same owner. hosts: names under which the
    server may be addressed (processes/network.py).
    """
    routes = [Route(API + "{path:path}", Api(server, keys).handle, methods=["GET", "POST", "PUT", "DELETE"])]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


class Api:
    """Answers the requests of clients."""

    def __init__(self, server: Server, keys: Collection[str]):
        self.server, self.keys = server, keys

    async def handle(self, request: Request) -> Response:
        try:
            owner, words = self._find_owner(request), request.path_params["path"].split("/")
            with self.server.budgets[owner].hold() as count:
                body = await read_body(request, MAX_BODY if words == ["forward_backward"] else MAX_JSON, count)
                if request.method == "POST" and len(words) == 1:
                    result = await self._post_or_refuse(words[0], body, owner, request)
                else:
                    result = await self._handle_resource(request.method, words, body, owner, request)
        except RequestError as error:
            return JSONResponse({"detail": str(error)}, error.status)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.url.path)
            return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)
        return result if isinstance(result, Response) else JSONResponse(result)

    def _find_owner(self, request: Request) -> str:
        if not self.keys:
            if "origin" in request.headers:
                raise RequestError("the request comes from a web page. Use the client tinker.", status=403)
            return LOCAL
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self.keys:
            raise RequestError("the API key is unknown. Set TINKER_API_KEY to a key of this server.", status=401)
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    async def _post_or_refuse(self, name: str, body: bytes, owner: str, request: Request) -> Json:
        try:
            return await self._post(name, body, owner, request)
        except RequestError as error:
            if error.status != RETRIED and (call := find_numbered_call(body)) is not None:
                with suppress(RequestError):  # there is no such model
                    self.server.fail_call(*call, owner, error)
            raise

    async def _post(self, name: str, body: bytes, owner: str, request: Request) -> Json:
        server, version = self.server, get_client_version(request)

        def read(kind: type[T]) -> T:
            return json_requests.read_json(body, kind, version)

        if name in BODIES:
            return getattr(server, name)(read(BODIES[name]), owner)
        match name:
            case "forward_backward":
                return await server.forward_backward(body, owner)
            case "asample":
                return server.sample(read(json_requests.Sample), owner)
            case "retrieve_future":
                return await self._retrieve(read(json_requests.RetrieveFuture).request_id, owner)
            case "create_session":
                read(json_requests.CreateSession)
                return server.create_session(owner)
            case "session_heartbeat":
                try:
                    server.find_session(read(json_requests.SessionHeartbeat).session_id, owner)
                except RequestError as error:
                    raise RequestError(str(error), status=ENDED) from None
                return {"type": "session_heartbeat"}
            case "telemetry":
                return {"status": "accepted"}
            case "get_info":
                return self._describe_info(read(json_requests.GetInfo).model_id, owner)
            case "weights_info":
                model = server.store.find(read(json_requests.WeightsInfo).tinker_path, owner).model
                return describe_adapter(model)
        raise explain_unknown("POST", [name], version)

    async def _retrieve(self, request_id: str, owner: str) -> Response:
        self.server.find_session(request_id, owner)
        future = await self.server.futures.wait(request_id, HOLD_SECONDS)
        if future is None:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        if future.cancelled():
            raise RequestError(f"{request_id} was cancelled, because its session has ended.", status=404)
        if error := future.exception():
            category = "user" if isinstance(error, (ValueError, FloatingPointError)) else "server"
            return JSONResponse({"error": str(error) or repr(error), "category": category})
        result = future.result()
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)

    async def _handle_resource(self, method: str, words: list[str], body: bytes, owner: str, request: Request) -> Json:
        server, served, store = self.server, self.server.served, self.server.store
        match method, words:
            case "POST", ["client", "config"]:
                return {"parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": True}
            case "POST", ["client", "dynamic_config"]:
                return {}
            case "POST", ["sessions", session_id, "finish"]:
                server.find_session(session_id, owner)
                await asyncio.shield(server.end_session(session_id))
                return {}
            case "GET", ["healthz"]:
                return {"status": "ok"}
            case "GET", ["get_server_capabilities"]:
                model = {"model_name": served.name, "max_context_length": served.context}
                return {"supported_models": [model | {"trainable": True, "sampleable": True}]}
            case "GET", ["samplers", sampler_id]:
                path = server.find_sampler(sampler_id, owner).path
                return {"sampler_id": sampler_id, "base_model": served.name, "model_path": path}
            case "GET", ["sessions"]:
                return paginate(request, "sessions", [one for one, it in server.sessions.items() if it.owner == owner])
            case "GET", ["sessions", session_id]:
                session = server.find_session(session_id, owner)
                return {"training_run_ids": [*session.models], "sampler_ids": [*session.samplers]}
            case "GET", ["training_runs"]:
                runs = [self._describe_run(one) for one in store.list_models(owner)]
                return paginate(request, "training_runs", runs)
            case "GET", ["training_runs", model_id]:
                return self._describe_run(store.find_model(model_id, owner))
            case "GET", ["training_runs", model_id, "checkpoints"]:
                found = store.list_checkpoints(store.find_model(model_id, owner))
                return {"checkpoints": [one.describe() for one in found]}
            case "GET", ["checkpoints"]:
                found = [one for model in store.list_models(owner) for one in store.list_checkpoints(model)]
                return paginate(request, "checkpoints", [one.describe() for one in found])
            case "DELETE", ["training_runs", model_id, "checkpoints", kind, name]:
                store.remove(store.find(f"{model_id}/{kind}/{name}", owner).folder)
                return {}
            case "PUT", ["training_runs", model_id, "checkpoints", kind, name, "ttl"]:
                checkpoint, ttl = store.find(f"{model_id}/{kind}/{name}", owner), self._read_ttl(body, request)
                checkpoint.record.expires_at = None if ttl is None else time.time() + ttl
                store.write_record(checkpoint)
                return {}
        raise explain_unknown(method, words, get_client_version(request))

    def _read_ttl(self, body: bytes, request: Request) -> int | None:
        return json_requests.read_json(body, json_requests.TTL, get_client_version(request)).ttl_seconds

    def _describe_info(self, model_id: str, owner: str) -> JsonObject:
        record, served = self.server.find_model(model_id, owner).record, self.server.served
        data = {"arch": "", "model_name": served.name, "tokenizer_id": served.tokenizer}
        info = {"type": "get_info", "model_id": model_id, "model_name": served.name, "model_data": data}
        return info | {"is_lora": True, "lora_rank": record.lora.rank}

    def _describe_run(self, record: ModelRecord) -> JsonObject:
        session = self.server.sessions.get(record.model_id.partition(":")[0])
        active = session.models.get(record.model_id) if session else None
        found = {one.kind: one.describe() for one in self.server.store.list_checkpoints(record)}  # the newest of a kind
        return describe_adapter(record) | {
            "training_run_id": record.model_id,
            "model_owner": record.owner,
            "corrupted": False,
            "last_request_time": format_time(active.last_request if active else record.created),
            "last_checkpoint": found.get("weights"),
            "last_sampler_checkpoint": found.get("sampler_weights"),
        }


def describe_adapter(model: ModelRecord) -> JsonObject:
    lora = model.lora
    layers = {"train_unembed": False, "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
    return {"base_model": model.base_model, "is_lora": True, "lora_rank": lora.rank, **layers}


def paginate(request: Request, name: str, items: list[Json]) -> JsonObject:
    """Return the part of a list that the query's `limit` and `offset` select."""
    query = request.query_params
    try:
        limit, offset = max(0, int(query.get("limit", 100))), max(0, int(query.get("offset", 0)))
    except ValueError:
        raise RequestError(f"limit and offset must be integers, but the query is {query}.") from None
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


async def read_body(request: Request, limit: int, count: Callable[[int], None]) -> bytes:
    """Read and decompress a body of at most `limit` bytes. count: counts them. Raises RequestError for a body that is
    too large, damaged, or stops in the middle."""
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                if (size := size + len(part)) > limit:
                    raise RequestError(f"the body has more than {limit} bytes. Send smaller requests.", status=413)
                count(len(part) if size > UNCOUNTED else 0)
                parts.append(part)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_SECONDS:g} s. Send it again.", status=408) from None
    body = b"".join(parts)
    if encoding := request.headers.get("content-encoding"):
        body = await asyncio.to_thread(decompress, body, encoding, limit)
        count(len(body) if len(body) > UNCOUNTED else 0)
    return body


def get_client_version(request: Request) -> str:
    return request.headers.get("x-stainless-package-version", "(unknown version)")[:32]


def find_numbered_call(body: bytes) -> tuple[str, int] | None:
    """Return the model and the number of a call in JSON, if the body has them."""
    with suppress(ValueError, LookupError, TypeError):
        found = json_requests.decode_json(body)
        return str(found["model_id"]), int(found["seq_id"])
    return None


def explain_unknown(method: str, words: list[str], version: str) -> RequestError:
    return RequestError(
        f"{method} {'/'.join(words)[:200]} of tinker {version} is not supported by this server, which has most "
        f"endpoints of tinker {CLIENT_VERSION} (docs/tinker.md).",
        status=404,
    )
