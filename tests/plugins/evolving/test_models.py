"""A model served by the run, and tools of proposer and verifiers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alphaapollo.plugins.evolving import run as evolving_run
from tests.plugins.evolving.scripted import Command, Server, role_of
from tests.unit.trainer.evaluation.small_run import save_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def test_engine_of_the_run(command: Command, server: Server, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evolving_run, "start_reaper", lambda *_: None)  # it would end the test process
    command.forget_server()
    words = [
        f"models={{own: {{path: {model}}}, judge: {{base_url: '{server.url}', name: m}}}}",
        "roles.verifier.model=judge",
        "roles.summariser.plugin=''",
        "rollout.name=fake",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
    ]
    server.script = lambda messages, request: "Random words.\nVERDICT: wrong"
    command.run(*words)
    pool = command.pool
    own = [call for call in pool.calls.values() if call.model == "own"]
    assert {call.role for call in own} == {"proposer"} and all(1 <= call.tokens <= 16 for call in own)
    assert {call.stop for call in own} <= {"stop", "length"} and all(call.prompt_tokens for call in own)
    assert {role_of(one["messages"][0]["content"]) for one in server.requests} == {"verifier"}
    assert command.report()["table"]["wrong_against"] == len(pool.judgements) == 12
    assert {len(one.parents) for one in pool.candidates.values() if one.position.round == 1} <= {0, 1}


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
