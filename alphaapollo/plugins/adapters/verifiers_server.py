"""Server that runs episodes of a verifiers environment, in a Python installation with verifiers 0.4.

The libraries that verifiers requires conflict with vLLM's. So this script runs in its own process, and imports nothing
of this project (see verifiers.py).

    verifiers_server.py NAME ARGUMENTS    prints {"port": 4711} or {"error": "..."}
    WebSocket /episode/INDEX              -> {"messages": [...]}   <- {"answer": "..."}   for each turn
                                          -> {"reward": 1.0, "metrics": {...}, "error": ""}
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

HARNESS = "alphaapollo_chat"  # name under which verifiers imports ChatHarness


def load_environment(name: str, arguments: dict[str, Any]) -> Any:
    """Load an environment whose only agent is the policy. Raises ValueError for other environments."""
    import httpx
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.utils import loaders

    class ChatHarness(vf.Harness[vf.HarnessConfig]):
        """Send each state of the conversation to the model once, in this process."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> vf.ProgramResult:
            system, prompt = self.resolve_prompt(data)
            opening = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
            messages = [message_to_wire(message) for message in opening]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            async with httpx.AsyncClient(timeout=None, verify=False) as client:
                reply = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
            return vf.ProgramResult(exit_code=int(reply.is_error), stdout="", stderr=reply.text)

    sys.modules[HARNESS] = module = ModuleType(HARNESS)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    agents = {
        field: setting.default.harness
        for field, setting in loaders.env_config_type(name).model_fields.items()
        if isinstance(setting.default, vf.AgentConfig)
    }
    if len(agents) != 1 or any(agents.values()):
        raise ValueError(f"its agents are {', '.join(agents)}; only environments with one agent that chats can be used")
    agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    config = loaders.resolve_env_config({"taskset": {**arguments, "id": name}, next(iter(agents)): agent})
    return loaders.load_environment(config)


class EpisodeServer:
    """HTTP server of an environment's episodes, and of the model: it forwards model requests to the WebSocket."""

    def __init__(self, environment: Any):
        self._environment, self._tasks, self._known = environment, iter(environment.taskset), list[Any]()
        self._sockets: dict[str, Any] = {}  # by model name: each episode has its own
        self._client: Any = None
        self.find_task(0)

    def find_task(self, index: int) -> Any:
        """Return a task by its index, modulo the number of tasks. Raises ValueError if there is none."""
        self._known += itertools.islice(self._tasks, max(0, index + 1 - len(self._known)))
        if not self._known:
            raise ValueError("it has no tasks")
        return self._known[index % len(self._known)]

    async def run_episode(self, request: Any) -> Any:
        import verifiers.v1 as vf
        from aiohttp import web

        socket = web.WebSocketResponse()
        await socket.prepare(request)
        name = uuid.uuid4().hex
        self._sockets[name] = socket
        try:
            context = vf.ModelContext(model=name, client=self._client)
            episode = await self._environment.run_episode(self.find_task(int(request.match_info["index"])), context)
            await socket.send_json(format_result(episode))
        finally:
            del self._sockets[name]
        return socket

    async def complete(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        socket = self._sockets[body["model"]]
        await socket.send_json({"messages": body["messages"]})
        message = {"role": "assistant", "content": (await socket.receive_json())["answer"]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        completion = {"id": "0", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return web.json_response(completion)

    async def serve(self, announce: Callable[[dict[str, Any]], None]) -> None:
        import verifiers.v1 as vf
        from aiohttp import web

        app = web.Application(client_max_size=2**30)
        app.add_routes([web.get("/episode/{index}", self.run_episode), web.post("/chat/completions", self.complete)])
        async with self._environment.serving():
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            self._client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}", api_key_var="NO_API_KEY")
            announce({"port": port})
            await asyncio.Event().wait()


def format_result(episode: Any) -> dict[str, Any]:
    """Return reward, metrics and error of an episode. `metrics` includes the parts of the reward."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    metrics: dict[str, float] = {}
    for trace in episode.traces:
        parts = {name: reward and reward.value for name, reward in trace.rewards.items()}
        metrics |= {name: value for name, value in {**trace.metrics, **parts}.items() if value is not None}
    error = "" if episode.ok else "; ".join(f"{error.type}: {error.message}" for error in errors)
    return {"reward": sum(trace.reward for trace in episode.traces), "metrics": metrics, "error": error}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # environments may print

    def announce(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    def exit_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        server = EpisodeServer(load_environment(sys.argv[1], json.loads(sys.argv[2])))
        asyncio.run(server.serve(announce))
    except Exception as error:  # environment code may raise anything
        announce({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
