"""A session over vLLM's HTTP API with a recorded engine."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from alphaapollo.config.schema import Model
from alphaapollo.engines.agent_sessions import AgentSession, SessionLimits
from alphaapollo.engines.types import HttpApiSettings
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.rollout.agents.endpoint import SessionGate, serve_gate
from alphaapollo.rollout.agents.runner import build_turns_and_rows
from alphaapollo.rollout.token_context import check_rows_match_turns
from alphaapollo.types import Sampling
from tests.recorded_engine import RecordedEngine
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


def write_model(folder: Path) -> Path:
    """Write the config and the tokenizer of a model without weights. Its chat template shows tools."""
    tokenizer_of().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


class Script:
    """Answers of the recorded engine: for each prompt, the value of the first key that its end contains."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        end = prompt[prompt.rfind("<|im_start|>", 0, prompt.rfind("<|im_start|>")) :]
        return next((answer for key, answer in self.answers.items() if key in end), "OK")


class Server:
    """Endpoint over a recorded engine."""

    def __init__(self, folder: Path, max_length: int = MAX_LENGTH, reasoning_parser: str = "") -> None:
        self.script = Script()
        self.clients: list[Any] = []
        engine = RecordedEngine(Model(path=str(folder)), max_length, self.script)
        self.tokenizer = engine.renderer.tokenizer
        self.app = engine.build_http_app(HttpApiSettings("hermes", reasoning_parser))

    def build_http_app(self, settings: HttpApiSettings) -> Any:
        return self.app

    def connect(self, endpoint, key, client=openai.AsyncOpenAI):
        url = f"{endpoint.url}/v1" if client is openai.AsyncOpenAI else endpoint.url
        self.clients.append(client(base_url=url, api_key=key, max_retries=0, timeout=60))
        return self.clients[-1]

    def run(self, play: Callable, *, max_requests=100, max_model_len=MAX_LENGTH, budget=MAX_LENGTH):
        """Run `play(endpoint, session, client)` and return (session, rows); rows are checked against the engine's
        prompts. Then forget the script's answers."""
        self.script.prompts.clear()
        limits = SessionLimits(max_model_len, max_requests)
        session = AgentSession(Sampling(budget), lambda number: number % 2**31, limits)

        async def serve():
            endpoint = SessionGate(lambda: self.app)
            async with serve_gate(endpoint):
                try:
                    with endpoint.open_session(session, TimeLimit(60)):
                        await play(endpoint, session, self.connect(endpoint, session.token))
                finally:
                    await asyncio.gather(*(client.close() for client in self.clients))
                    self.clients.clear()
                    self.script.answers = {}

        asyncio.run(serve())
        return session, rows_of(session)


def rows_of(session: AgentSession, train="all", untrained_roles=()):
    turns, rows, *prompts = build_turns_and_rows(session, train, untrained_roles)
    check_rows_match_turns(rows, turns, *prompts)
    return rows
