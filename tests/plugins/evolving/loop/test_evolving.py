"""Self-evolution with its own engine and with a server: a killed run resumes, repeats no call, and gets the results of
an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import alphaapollo
from alphaapollo.plugins.evolving.pool import Pool
from alphaapollo.plugins.evolving.roles import ModelReply, Proposer, RoleView, Verifier, VerifierReport, make_user_chat
from alphaapollo.types import Message, Prompt
from tests.loop.conftest import (
    MARK,
    FinishedRun,
    Runner,
    Task,
    check_first_and_last_lines,
    processes_of,
    wait_until_nothing_is_left,
)
from tests.loop.warm import Program
from tests.plugins.evolving.scripted import Command, Server, arithmetic, serving

PROBLEMS, ROUNDS, VOTES = 3, 2, 2
ROLES = f'''
"""Short prompts for a small model. If a file named `kill` is in this folder, the process is killed at a fixed call."""

import os
import signal
from pathlib import Path

from alphaapollo.plugins.evolving.roles import Proposer, VerifierReport, Verifier, register_role, make_user_chat

KILL = Path(__file__).with_name("kill")
built = []


@register_role("short_proposer")
class Short(Proposer):
    def build(self, view):
        return make_user_chat(" ".join([view.question, *(past.solution for past in view.past)]))


@register_role("digits")
class Digits(Verifier):
    """Vote by the number of digits in the reply. A reply without digits is an invalid report and is retried."""

    def build(self, view):
        built.append(view)
        if len(built) == {PROBLEMS * VOTES + 2} and KILL.exists():
            KILL.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return make_user_chat(f"{{view.question}} {{view.solution}} ?")

    def read(self, reply):
        digits = sum(map(str.isdigit, reply.text))
        return VerifierReport(digits % 2 == 0, reply.text) if digits else None
'''  # the kill is in the second round, with other calls in flight


class EvolvingRunner(Runner):
    """Starts evolving.main with small sizes, forked from the warm process."""

    module = "alphaapollo.evolving.main"

    def start(self, *overrides: str, name: str = "run", warm: bool | None = True) -> Program:
        return super().start(*overrides, name=name, warm=warm)

    def sizes(self, name: str) -> dict[str, Any]:
        return {
            "data.path": self.out / "problems.parquet",
            "data.max_prompt_length": 200,
            "data.max_response_length": 16,
            "models.policy.path": self.task.model,
            "rollout.kv_cache_gib": 0.1,
            "rollout.cpu_threads": 1,
            "roles.proposer.plugin": "short_proposer",
            "roles.summariser.plugin": "''",
            "roles.verifier.plugin": "digits",
            "evolving.rounds": ROUNDS,
            "evolving.votes": VOTES,
            "evolving.custom_module": self.out / "roles.py",
            "env.env_name": "single_turn",
            "custom_reward_function.path": self.reward,
            "trainer.output_dir": self.out,
            "trainer.project_name": "test",
            "trainer.experiment_name": name,
        }


@pytest.fixture
def evolving(task: Task, tmp_path: Path) -> Iterator[EvolvingRunner]:
    runner = EvolvingRunner(task, tmp_path)
    pd.read_parquet(task.data / "val.parquet").head(PROBLEMS).to_parquet(tmp_path / "problems.parquet")
    (tmp_path / "roles.py").write_text(ROLES)
    yield runner
    runner.close()


def results(folder: Path) -> dict[str, Any]:
    """All results of a run, without times."""
    report = json.loads((folder / "report.json").read_text())
    for cost in report["roles"].values():
        del cost["seconds"]
    problems = [json.loads(path.read_text()) for path in sorted((folder / "problems").iterdir())]
    return {"report": report, "problems": problems, "metrics": (folder / "metrics.jsonl").read_text()}


@pytest.mark.core
def test_killed_run_with_its_own_engine_resumes(evolving: EvolvingRunner) -> None:
    """test_agents.py shows the same for a program of the user that proposes."""
    whole = evolving.run("rollout.name=hf", name="whole")
    check_first_and_last_lines(whole, "view", "report")

    (evolving.out / "kill").touch()
    killed = evolving.finish(evolving.start("rollout.name=hf"))
    assert killed.code == -signal.SIGKILL and not (evolving.out / "kill").exists(), killed.output[-4000:]
    wait_until_nothing_is_left(evolving)
    killed_pool = Pool(killed.folder)
    assert 0 < len(killed_pool.judgements) < len(killed_pool.candidates), "killed in the middle"

    resumed = evolving.run("rollout.name=hf")
    assert f"resuming from {len(killed_pool.calls)} calls, {len(killed_pool.candidates)} candidates" in resumed.output
    wait_until_nothing_is_left(evolving)
    pool = Pool(resumed.folder)
    assert len(pool.candidates) == PROBLEMS * ROUNDS and not any(one.failure for one in pool.candidates.values())
    assert len(pool.all_calls) == len(pool.calls), "a call was repeated"
    assert any(one.parents for one in pool.candidates.values())
    assert results(resumed.folder) == results(whole.folder)


def test_stopped_engine_core_is_named_and_ends_the_run(evolving: EvolvingRunner) -> None:
    program = evolving.start("rollout.name=vllm", "evolving.rounds=1000", "trainer.stall_timeout=3")
    program.wait_for(lambda: len(Pool(evolving.out / "test/run").calls) >= 3)
    (pid,) = [pid for pid, line in processes_of(evolving).items() if "EngineCore" in line]
    os.kill(pid, signal.SIGSTOP)
    done = evolving.finish(program)
    error = done.output.splitlines()[-1]
    assert done.code == 1 and error.startswith("error: no progress for "), done.output[-4000:]
    assert f"models.policy (pid {pid}) is stopped" in error and "waits for a reply of models.policy (" in error
    wait_until_nothing_is_left(evolving)


class Gate:
    """A script that answers `count` requests and blocks later ones. `answered`: the requests with an answer."""

    def __init__(self, count: int = 10**6):
        self.answered: list[str] = []
        self._left, self._is_closed = threading.Semaphore(count), False

    def __call__(self, messages: list[dict[str, str]], request: dict[str, Any]) -> Any:
        self._left.acquire()
        if self._is_closed:
            return 503
        self.answered.append(json.dumps(request, sort_keys=True))
        return arithmetic(messages, request)

    def close(self) -> None:
        """Release blocked requests, without an answer."""
        self._is_closed = True
        self._left.release(1000)


@pytest.fixture
def server(evolving: EvolvingRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server of the runs, which have the default roles."""
    pytest.importorskip("openai", reason="the client of servers is an optional package")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(arithmetic) as server:
        sizes = Command(evolving.out, server.url, problems=4).defaults
        sizes |= {"models.policy.max_concurrent": 3, "trainer.output_dir": evolving.out}
        monkeypatch.setattr(evolving, "sizes", lambda name: sizes | {"trainer.experiment_name": name})
        yield server


def run_until_signal(evolving: EvolvingRunner, gate: Gate, end: signal.Signals, calls: int) -> FinishedRun:
    """Send a signal when `calls` calls are logged and further ones are blocked."""
    program = evolving.start()
    program.wait_for(lambda: len(Pool(evolving.out / "test/run").calls) >= calls)
    program.signal(end)
    done = evolving.finish(program)
    gate.close()
    wait_until_nothing_is_left(evolving)
    return done


def test_killed_and_interrupted_runs_repeat_no_request(evolving: EvolvingRunner, server: Server) -> None:
    everything, killed, interrupted, rest = Gate(), Gate(14), Gate(13), Gate()
    server.script = everything
    whole = evolving.run(name="whole")

    server.script = killed
    assert run_until_signal(evolving, killed, signal.SIGKILL, 14).code == -signal.SIGKILL
    server.script = interrupted
    stopped = run_until_signal(evolving, interrupted, signal.SIGTERM, 27)
    assert stopped.code == 130 and "resuming from 14 calls" in stopped.output, stopped.output[-4000:]
    assert "interrupted; " in stopped.output and "Traceback" not in stopped.output, stopped.output
    server.script = rest
    done = evolving.run()
    assert "resuming from 27 calls" in done.output, done.output[-4000:]
    wait_until_nothing_is_left(evolving)

    answered = killed.answered + interrupted.answered + rest.answered
    assert sorted(answered) == sorted(everything.answered), "the same requests, once each"
    assert len({*answered}) == len(answered) == len(Pool(done.folder).all_calls) == 4 * 2 * 5
    assert results(done.folder) == results(whole.folder)


class Short(Proposer):
    def build(self, view: RoleView) -> list[Message]:
        return make_user_chat(" ".join([view.question, *(past.solution for past in view.past)]))


class AcceptingVerifier(Verifier):
    def build(self, view: RoleView) -> list[Message]:
        return make_user_chat(f"{view.solution} ?")

    def read(self, reply: ModelReply) -> VerifierReport | None:
        return VerifierReport(True, reply.text)


def likes_digits(prompt: Prompt, completion: str) -> float:
    return float(sum(map(str.isdigit, completion)) % 2)


def test_python_objects(evolving: EvolvingRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(evolving.out))
    given = ("custom_reward_function.path", "evolving.custom_module", "roles.proposer.plugin", "roles.verifier.plugin")
    settings = {key: value for key, value in evolving.sizes("run").items() if key not in given}
    rounds: list[tuple[int, float]] = []

    run = alphaapollo.evolve(
        settings | {"rollout.name": "fake", "roles.summariser.plugin": ""},
        reward=likes_digits,
        roles={"proposer": Short, "verifier": AcceptingVerifier},
        on_round=lambda number, metrics: rounds.append((number, metrics["candidates/made"])),
    )
    assert rounds == [(0, PROBLEMS), (1, PROBLEMS)]
    assert run.metrics["accuracy/sampled"].between(0, 1).all()
    assert run.metrics["table/right_for"].sum() + run.metrics["table/wrong_for"].sum() == PROBLEMS * ROUNDS
    assert run.report["roles"]["verifier"]["calls"] == PROBLEMS * ROUNDS * VOTES
    assert run.problems[2]["candidates"][1]["parents"]
    wait_until_nothing_is_left(evolving)
