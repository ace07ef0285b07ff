"""A session over vLLM's HTTP API with a canned engine."""

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai

from alphaapollo.config.schema import Model
from alphaapollo.engines.http_api import HttpApiSettings
from alphaapollo.engines.vllm.canned import CannedEngine
from alphaapollo.rollout.agents.endpoint import EndpointServer, SessionGate
from alphaapollo.rollout.agents.rows import build_turns_and_rows
from alphaapollo.rollout.agents.session import Session, SessionLimits
from alphaapollo.rollout.context import check_rows_match_turns
from alphaapollo.types import Sampling
from alphaapollo.utils.time_limit import TimeLimit
from tests.unit.tool_templates import tokenizer_of

MAX_LENGTH = 4096
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def write_model(folder: Path) -> None:
    """Write the config and the tokenizer of a model without weights. Its chat template shows tools."""
    tokenizer_of().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))


class Script:
    """Answers of the canned engine: for each prompt, the value of the first key that its end contains."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        end = prompt[prompt.rfind("<|im_start|>", 0, prompt.rfind("<|im_start|>")) :]
        return next((answer for key, answer in self.answers.items() if key in end), "OK")


class Server:
    """Endpoint over a canned engine."""

    def __init__(self, folder: Path, max_length: int = MAX_LENGTH) -> None:
        self.script = Script()
        self.clients: list[Any] = []
        engine = CannedEngine(Model(path=str(folder)), max_length, self.script)
        self.tokenizer = engine.renderer.tokenizer
        self.app = engine.build_http_app(HttpApiSettings(["policy"], tool_parser="hermes", reasoning_parser=""))

    def build_http_app(self, settings: HttpApiSettings) -> Any:
        return self.app

    @asynccontextmanager
    async def open(self, **limits):
        """Start the endpoint with one session. Yields (endpoint, session)."""
        endpoint = EndpointServer(SessionGate(self.app))
        await endpoint.start()
        session = self.make_session(**limits)
        try:
            with endpoint.gate.open_session(session, TimeLimit(60)):
                yield endpoint, session
        finally:
            await endpoint.close()

    def connect(self, endpoint, session=None, key=""):
        client = openai.AsyncOpenAI(
            base_url=f"{endpoint.url}/v1", api_key=key or session.token, max_retries=0, timeout=60
        )
        self.clients.append(client)
        return client

    def connect_anthropic(self, endpoint, session=None, key=""):
        client = anthropic.AsyncAnthropic(
            base_url=endpoint.url, api_key=key or session.token, max_retries=0, timeout=60
        )
        self.clients.append(client)
        return client

    def make_session(
        self, *, max_requests=100, temperature=1.0, max_model_len=MAX_LENGTH, budget=MAX_LENGTH
    ) -> Session:
        limits = SessionLimits(max_model_len, max_requests)
        return Session(Sampling(budget, temperature), lambda number: number % 2**31, limits)

    def run(self, play: Callable, **limits):
        """Run `play(endpoint, session)` and return (session, rows); rows are checked against the engine's prompts."""

        async def serve():
            async with self.open(**limits) as (endpoint, session):
                try:
                    await play(endpoint, session)
                finally:
                    await asyncio.gather(*(client.close() for client in self.clients))
                    self.clients.clear()
            return session

        session = asyncio.run(serve())
        return session, rows_of(session)


def rows_of(session: Session, train="all", untrained_roles=()):
    turns, rows, *prompts = build_turns_and_rows(session, train, untrained_roles)
    check_rows_match_turns(rows, turns, *prompts)
    return rows
