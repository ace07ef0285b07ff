"""A model served by the run, and tools of proposer and verifiers."""

from __future__ import annotations

import re

from tests.plugins.evolving.scripted import Command, Server, role_of


def test_proposer_and_verifiers_call_tools(command: Command, server: Server) -> None:
    def calculates(messages: list, request: dict) -> str:
        said = messages[-1]["content"]
        found = re.search(r'"text": "(\d+)', said)
        if role_of(messages[0]["content"]) == "summariser":
            return "It was computed."
        if found is None:
            left, right = re.search(r"What is (\d+) \+ (\d+)", messages[0]["content"]).groups()
            return f"<python_code>{left} + {right}</python_code> and more"
        if role_of(messages[0]["content"]) == "verifier":
            return "I computed it too.\nVERDICT: right"
        return rf"<answer>\boxed{{{found[1]}}}</answer>"

    server.script = calculates
    command.run("env.env_name=informal_math", "env.max_steps=3", "evolving.rounds=1", "evolving.votes=1")
    pool = command.pool
    candidate = pool.candidates["p2.r0.b0.i0"]
    assert [message["role"] for message in candidate.messages] == ["user", "assistant", "user", "assistant"]
    assert candidate.messages[1]["content"] == "<python_code>13 + 34</python_code>", (
        "the text after the call is removed"
    )
    assert candidate.is_right is True and candidate.answer == "47"
    assert command.report()["table"]["right_for"] == 6
    asked = pool.judgements["p2.r0.b0.i0"].verdicts[0].messages[0]["content"]
    assert "<python_code>" in asked and "VERDICT" in asked
    assert sum(call.role == "verifier" for call in pool.calls.values()) == 12, "a tool call, then the report"
