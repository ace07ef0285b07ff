"""Complete evolutions against a scripted server, in this process: results, resume, invalid configurations."""

from __future__ import annotations

import itertools
import json

import pandas as pd
import pytest

from alphaapollo.plugins.evolving import calls
from alphaapollo.plugins.evolving.api import EvolutionRun
from alphaapollo.plugins.evolving.settings import EvolvingConfig
from tests.plugins.evolving.scripted import Command, Server, arithmetic, role_of
from tests.unit.metric_names import undocumented

PROBLEMS, ROUNDS, VOTES = 6, 2, 3
CALLS = PROBLEMS * ROUNDS * (1 + 1 + VOTES)  # a proposer, a summariser, the verifiers


def test_from_problems_to_results(command: Command, server: Server) -> None:
    printed = command.run()
    assert len(server.requests) == CALLS == len(command.pool.calls)
    assert "round 0   accuracy " in printed and "policy \\ verifiers" in printed
    result = command.problem(3)
    assert (len(result["candidates"]), result["ground_truth"]) == (ROUNDS, "55")
    first, second = result["candidates"]
    assert (first["parents"], second["parents"]) == ([], [first["key"]])
    assert [len(one["verdicts"]) for one in (first, second)] == [VOTES, VOTES]
    assert first["calls"] == 5 and first["tokens"] == 75
    report = command.report()
    assert [one["round"] for one in report["rounds"]] == [0, 1]
    assert report["roles"]["verifier"]["calls"] == PROBLEMS * ROUNDS * VOTES
    assert (report["halted"], report["failures"]) == ("", {})
    shown = [request["messages"][0]["content"] for request in server.requests]
    later = [text for text in shown if role_of(text) == "proposer" and "Earlier attempts" in text]
    assert len(later) == PROBLEMS and all("of 3 reviewers say it is right" in text for text in later)


def test_budget_limits_the_run_and_the_python_api_reads_it(command: Command, server: Server) -> None:
    printed = command.run("budget.calls=40")
    assert "ended early: budget.calls=40 is spent" in printed
    assert len(server.requests) == 40  # round 0 takes 30 of them
    assert all(command.problem(index)["chosen"] for index in range(PROBLEMS))
    run = EvolutionRun(command.folder, EvolvingConfig())
    assert undocumented(run.metrics.columns) == []
    assert run.metrics["cost/calls"].to_dict() == {0: 30, 1: 10}, "includes the round that was cut short"
    command.run()  # without the limit
    assert len(server.requests) == CALLS and command.report()["halted"] == ""
    rounds, metrics = run.report["rounds"], run.metrics
    assert metrics["accuracy/oracle"].to_list() == [one["oracle"]["value"] for one in rounds]
    assert metrics["accuracy/chosen/high"].to_list() == [one["chosen"]["high"] for one in rounds]
    assert metrics["table/right_for"].to_list() == [one["table"]["right_for"] for one in rounds]
    assert metrics["cost/calls"].sum() == CALLS and metrics["candidates/made"].to_list() == [PROBLEMS] * 2
    assert [one["problem"] for one in run.problems] == list(range(PROBLEMS)) and run.pool == command.pool.path
    (axes,) = run.plot().axes
    assert len(axes.lines) == 4 and len(axes.collections) == 4  # curves, intervals
    (axes,) = run.plot("cost/tokens").axes
    assert (len(axes.lines), len(axes.collections)) == (1, 0)
    with pytest.raises(ValueError, match="has no values of 'cost/token'"):
        run.plot("cost/token")


def test_killed_run_resumes_without_repeating_calls(command: Command, server: Server) -> None:
    command.run()
    whole = command.pool.path.read_bytes()
    results = [command.problem(index) for index in range(PROBLEMS)]
    for cut in (0.2, 0.5, 0.83):  # a kill truncates the file anywhere
        kept = whole[: int(len(whole) * cut)]
        command.pool.path.write_bytes(kept)
        held = {line["key"] for line in map(json.loads, kept.splitlines()[:-1]) if line["kind"] == "call"}
        server.requests.clear()
        printed = command.run()
        assert "an incomplete last line" in printed and f"resuming from {len(held)} calls" in printed
        assert len(server.requests) == CALLS - len(held)
        assert [command.problem(index) for index in range(PROBLEMS)] == results
    server.requests.clear()
    command.run("evolving.rounds=3")
    assert len(server.requests) == CALLS // ROUNDS, "more rounds continue the run"
    with pytest.raises(ValueError, match=r"evolving.votes=3 \(now 5\)"):
        command.run("evolving.votes=5")
    rows = pd.read_parquet(command.defaults["data.path"])
    rows.iloc[::-1].to_parquet(command.defaults["data.path"])
    with pytest.raises(ValueError, match=r"row \d of data\.path .*candidate p\d"):
        command.run("evolving.rounds=4")


def test_server_failures_are_counted_and_excluded(
    command: Command, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = itertools.count()
    bad = [429, 503, b"<html>", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}', 400, ""]

    def flaky(messages: list, request: dict):
        number = next(count)
        return arithmetic(messages, request) if number % 5 else bad[number // 5 % len(bad)]

    server.script = flaky
    monkeypatch.setattr(calls, "MAX_FAILURES", 1000)
    monkeypatch.setattr(calls, "MAX_ASKS", 9)
    command.run()
    report, pool = command.report(), command.pool
    failed = [call for call in pool.calls.values() if call.failure]
    assert report["failures"]["calls"] == len(failed) > 5
    assert {call.failure.split(":")[0] for call in failed} >= {"status 429", "status 503", "status 400"}
    made = [one for one in pool.candidates.values() if not one.failure]
    assert len(made) < PROBLEMS * ROUNDS == len(pool.candidates)
    graded = sum(sum(own["table"].values()) for own in report["rounds"])
    assert graded == len(made), "failures are excluded"


def test_stop_file_ends_the_run_with_results(command: Command, server: Server) -> None:
    def stops(messages: list, request: dict):
        if len(server.requests) == 20:
            (command.folder / "STOP").touch()
        return arithmetic(messages, request)

    server.script = stops
    printed = command.run("models.policy.max_concurrent=2")
    assert "STOP exists" in printed and 20 <= len(server.requests) < 25
    assert command.report()["halted"]
    command.run("models.policy.max_concurrent=2")
    assert len(server.requests) == CALLS


def test_missing_reports_and_answers_are_requested_and_then_counted(command: Command, server: Server) -> None:
    def shy(messages: list, request: dict):
        role, text = role_of(messages[0]["content"]), messages[0]["content"]
        if role == "verifier" and "11 + 20" in text:
            return "Hm."
        return "I would rather not say." if role == "proposer" and len(messages) == 1 else arithmetic(messages, request)

    server.script = shy
    command.run()
    verdicts = [one for own in command.pool.judgements.values() for one in own.verdicts if one.failure]
    assert len(verdicts) == ROUNDS * VOTES == command.report()["failures"]["verdicts"]
    assert "3 attempts" in verdicts[0].failure and "'Hm.'" in verdicts[0].failure
    assert command.report()["table"]["unjudged"] == ROUNDS
    candidate = command.pool.candidates["p0.r0.b0.i0"]
    assert [message["role"] for message in candidate.messages] == ["user", "assistant", "user", "assistant"]
    assert "Give your final answer now" in candidate.messages[2]["content"] and candidate.is_right is not None


def test_roles_with_own_models_and_branches(command: Command, server: Server) -> None:
    address = f"base_url: '{server.url}'"
    command.forget_server()
    command.run(
        f"models={{a: {{{address}, name: A}}, b: {{{address}, name: B, price_in: 1000}}}}",
        *("evolving.branches=[a,b]", "roles.verifier.model=b"),
    )
    asked = {(role_of(one["messages"][0]["content"]), one["model"]) for one in server.requests}
    assert {("proposer", "A"), ("proposer", "B"), ("verifier", "B"), ("summariser", "A")} <= asked
    assert ("verifier", "A") not in asked
    pool = command.pool
    parents = {key.split(".")[2] for one in pool.candidates.values() for key in one.parents}
    assert parents == {"b0", "b1"}, "the branches share one memory"
    read = sum(call.prompt_tokens for call in pool.calls.values() if call.model == "b")
    assert pool.total_usage.money == pytest.approx(read * 1000 / 1e6)


@pytest.mark.parametrize(
    ("word", "fact"),
    [
        ("roles.verifier.model=polcy", r"polcy .* policy"),
        ("roles.verifier.plugin=verifer", r"'verifer'\. Did you mean 'verifier'"),
    ],
)
def test_invalid_configurations(command: Command, word: str, fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        command.run(word)
