"""What the roles need of a model: messages in, a reply out. A server somewhere (server_client.py) or an engine of this
run (engine_client.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from alphaapollo.types import Message, Sampling


@dataclass(frozen=True)
class Reply:
    """What a model said."""

    text: str
    prompt_tokens: int
    tokens: int  # written
    stop: str  # stop, length, or the server's own word


class CallFailed(Exception):
    """There is no reply, after all retries; the text says why.

    `down`: for want of whom to ask, not for what was asked. Enough of these in a row stop the run.
    """

    def __init__(self, reason: str, down: bool = False):
        super().__init__(reason)
        self.down = down


class Client(Protocol):
    """One model. Calls may overlap; all are awaited on one event loop."""

    limit: float | None
    """Seconds within which a call ends, with or without a reply; None: no such limit."""

    async def start(self) -> None:
        """Ready to answer. ValueError: the model cannot be served."""
        ...

    async def generate(self, messages: Sequence[Message], sampling: Sampling, name: str) -> Reply:
        """The assistant's next message. `name` is unique among the calls in flight. CallFailed: there is none."""
        ...

    def fits(self, messages: Sequence[Message]) -> bool:
        """May so much be shown? True where it is not known."""
        ...

    async def close(self) -> None: ...
