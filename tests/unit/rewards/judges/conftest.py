from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.mock_judge import MockJudge, Reply

Start = Callable[..., MockJudge]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a mock judge. Replies are given in turn, and the last one is repeated; or a function chooses them."""
    pytest.importorskip("openai", reason="the judge's client is an optional package")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ExitStack() as stack:

        def start_judge(*replies: Reply | Callable[[str], Reply], **settings: Any) -> MockJudge:
            waiting = [*replies]

            def reply(content: str) -> Reply:
                chosen = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                return chosen(content) if callable(chosen) else chosen

            return stack.enter_context(MockJudge(reply, **settings).serve())

        yield start_judge
