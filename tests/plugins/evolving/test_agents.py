"""Complete evolutions in which a program of the user proposes, with a recorded engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import Model
from alphaapollo.engines import factory
from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.plugins.evolving import run as evolving_run
from alphaapollo.types import Completion, ImageInput, Sampling, StopReason
from tests.plugins.evolving.scripted import Command
from tests.recorded_engine import RecordedEngine
from tests.unit.rollout.agents.agents_kit import MAX_LENGTH, Script, write_model

PROBLEMS, ROUNDS, VOTES = 2, 2, 2
REQUESTS = 3  # of a program
PROGRAM = """
from openai import OpenAI

def run(task, endpoint):
    client = OpenAI(max_retries=0)
    def ask(messages, **options):
        answer = client.chat.completions.create(model=endpoint.model, messages=messages, **options)
        return {"role": "assistant", "content": answer.choices[0].message.content}
    first = ask(task["content"])
    checked = ask([{"role": "user", "content": "sub-agent"}], extra_headers={"x-role": "checker"})
    last = ask([*task["content"], first, {"role": "tool", "content": "tool result"}])
    END
"""


class CannedModel(RecordedEngine, Engine):
    """Canned engine that also answers the other roles."""

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        tokenizer: Any = self.renderer.tokenizer
        ids = [*tokenizer.encode(self._answer(tokenizer.decode(token_ids)), add_special_tokens=False), 1]
        return Completion(ids, [0.0] * len(ids), StopReason.STOP, 0)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def script() -> Script:
    script = Script()
    script.answers = {"Judge a solution": "fine\nVERDICT: right", "tool result": "#### 31", "What is": "I call a tool"}
    return script


@pytest.fixture
def evolution(
    command: Command, folder: Path, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    def make_engine(spec: EngineSpec) -> CannedModel:
        assert spec.chat_tokenizer == str(folder)
        return CannedModel(Model(path=spec.model_path), spec.max_model_len, script)

    monkeypatch.setattr(factory, "make_engine", make_engine)
    monkeypatch.setattr(evolving_run, "start_reaper", lambda *_: None)
    monkeypatch.setattr(evolving_run, "try_environment", lambda *_: [])  # test_runner.py tests it
    command = Command(tmp_path, "", PROBLEMS)
    command.forget_server()
    command.defaults |= {
        "models.policy.path": folder,
        "env.env_name": "agent",
        "env.agent.path": write_program(tmp_path, "return 0.25"),
        "data.max_prompt_length": MAX_LENGTH - 128,
        "data.max_response_length": 128,
        "roles.summariser.plugin": "''",
        "evolving.votes": VOTES,
        "trainer.device": "cpu",
    }
    return command


def write_program(folder: Path, end: str) -> Path:
    (folder / "agent.py").write_text(PROGRAM.replace("END", end))
    return folder / "agent.py"


def test_program_proposes(evolution: Command, script: Script) -> None:
    evolution.run("env.agent.grade=true")
    pool = evolution.pool
    first, second = evolution.problem(0)["candidates"]
    one = pool.candidates[first["key"]]
    roles = ["user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in one.messages] == roles and one.num_prompt_messages == 1
    assert one.solution == "I call a tool\n\ntool result\n\n#### 31" and one.answer == "31"
    assert one.is_right is True and one.grade.reward == 1.25
    assert second["parents"] == [one.key]
    assert "Earlier attempts at this" in pool.candidates[second["key"]].messages[0]["content"]
    calls = [call for call in pool.all_calls if call.role == "proposer"]
    assert len(calls) == len({call.key for call in calls}) == REQUESTS * PROBLEMS * ROUNDS
    assert all(call.prompt_tokens > call.tokens > 0 and call.seed and not call.failure for call in calls)
    assert evolution.report()["roles"]["verifier"]["calls"] == VOTES * PROBLEMS * ROUNDS
    other = pool.candidates[evolution.problem(1)["candidates"][0]["key"]]
    assert other.is_right is False


def test_failures_are_counted_and_have_no_score(evolution: Command, tmp_path: Path) -> None:
    write_program(tmp_path, "raise KeyError('boom')")
    evolution.run("evolving.rounds=1")
    made = list(evolution.pool.candidates.values())
    assert len(made) == PROBLEMS and all(one.grade is None for one in made)
    assert all("the program failed: KeyError: 'boom'" in one.failure for one in made)
    assert evolution.report()["failures"]["candidates"] == PROBLEMS


def test_killed_run_resumes(evolution: Command, script: Script) -> None:
    evolution.run()
    whole, report = evolution.pool.path.read_bytes(), evolution.report()["rounds"]
    candidates = evolution.pool.candidates
    kept = whole[: len(whole) // 2]
    evolution.pool.path.write_bytes(kept)
    made = len(evolution.pool.candidates)
    assert 0 < made < len(candidates)
    script.prompts.clear()
    printed = evolution.run()
    assert f"{made} candidates" in printed and evolution.report()["rounds"] == report
    resumed = evolution.pool.candidates
    assert {key: one.messages for key, one in resumed.items()} == {key: one.messages for key, one in candidates.items()}
    assert len([prompt for prompt in script.prompts if "sub-agent" in prompt]) == len(candidates) - made


def test_a_server_cannot_propose(evolution: Command) -> None:
    server = "models.other={base_url: http://localhost/v1, name: m}"
    with pytest.raises(ConfigError, match=r"env\.env_name=agent.*other\."):
        evolution.run(server, "evolving.branches=[policy,other]")
    with pytest.raises(ConfigError, match=r"models\.other\.path"):
        evolution.run(server, "roles.proposer.model=other")
