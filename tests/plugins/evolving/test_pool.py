"""Records of an evolution, and what is computed from them: budget and calibration."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.plugins.evolving.calls import Budget, EvolutionStopped
from alphaapollo.plugins.evolving.export import export_training_rows
from alphaapollo.plugins.evolving.pool import (
    FILE,
    Candidate,
    Grade,
    Judgement,
    ModelCall,
    Pool,
    Position,
    Usage,
    Verdict,
)
from alphaapollo.plugins.evolving.report import compute_calibration
from alphaapollo.plugins.evolving.settings import EvolvingBudget
from alphaapollo.runs.checkpoint_folder import FORMAT
from alphaapollo.types import Message, Outcome
from tests.old_runs.make import ARCHIVES, unpack
from tests.unit.runs.test_format import set_format

PLACE = Position(17, 2, 0, 1)
MESSAGES = (Message(role="user", content="2+2?"), Message(role="assistant", content="4"))
RIGHT = Grade(Outcome.SCORED, 1.0, 1.0)
VERDICTS = (Verdict("policy", failure="no result"), Verdict("policy", MESSAGES[:1], True, "good"))
RECORDS: list[Any] = [
    ModelCall("p17.r2.b0.i1/proposer/turn0", "proposer", "policy", "ab", 2**62, 1.5, 0.5, "4", 10, 5, 0.25, "stop"),
    ModelCall("p17.r2.b0.i1/verifier.0/ask0.turn0", "verifier", "policy", "cd", 1, 2.5, 0.5, failure="status 503"),
    Candidate(PLACE.key, PLACE, "policy", ("p17.r1.b0.i0",), MESSAGES, 1, "4", "4", "4", RIGHT),
    Judgement(PLACE.key, 2, 1, "good", VERDICTS),
]


def filled(folder: Path) -> Pool:
    with Pool(folder) as pool:
        for record in RECORDS:
            pool.append(record)
    return pool


def test_records_survive_writing_and_reading(tmp_path: Path) -> None:
    filled(tmp_path)
    pool = Pool(tmp_path)
    calls, candidate = list(pool.calls.values()), pool.candidates[PLACE.key]
    assert [*calls, candidate] == RECORDS[:3] and PLACE.key == "p17.r2.b0.i1"
    assert candidate.is_right is True
    failed = Grade(Outcome.GRADER_FAILED, None, None, "it crashed")
    assert Candidate(PLACE.key, PLACE, "policy", grade=failed).is_right is None, "no wrong answer"
    assert pool.judgements[PLACE.key] == RECORDS[3] and pool.judgements[PLACE.key].share_of_votes == 2 / 3
    assert pool.total_usage == pool.usage[PLACE.key] == Usage(2, 15, 0.25)
    assert (pool.seconds, pool.incomplete_bytes) == (2.5, 0)


def test_only_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    whole = filled(tmp_path).path.read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-20])
    pool = Pool(tmp_path)
    assert PLACE.key in pool.candidates and not pool.judgements
    assert (tmp_path / FILE).read_bytes() == whole[:-20], "reading changes nothing"
    with pool:
        pool.append(RECORDS[-1])
    assert (tmp_path / FILE).read_bytes() == whole


def test_invalid_line_is_an_error(tmp_path: Path) -> None:
    lines = filled(tmp_path).path.read_text().splitlines()
    earlier = '{"kind": "call", "key": "p0.r0.b0.i0/proposer/turn0", "asked": "ab", "at": 1.0}'
    for bad in ("rubbish", '{"kind": "guess"}', '{"kind": "judgement"}', "[]", earlier):
        (tmp_path / FILE).write_text("\n".join([lines[0], bad, *lines[1:], ""]))
        with pytest.raises(ValueError, match=r"line 2 of .*pool\.jsonl"):
            Pool(tmp_path)


def test_judgement_without_votes() -> None:
    assert Judgement("c", 0, 0, "").is_accepted is None and Judgement("c", 0, 0, "").share_of_votes == 0.5
    assert Judgement("c", 1, 1, "").is_accepted is False, "a tie is against"


def test_secrets_and_lone_surrogates_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATE_KEY", secret := 'BEGIN "KEY"\nabcdef')
    chat = (Message(role="user", content=f"{secret} \ud800"),)
    with Pool(tmp_path) as pool:
        returned = pool.append(Judgement(PLACE.key, 1, 0, secret, (Verdict("policy", chat, True, secret),)))
    logged = Pool(tmp_path).judgements[PLACE.key]
    assert logged == returned == pool.judgements[PLACE.key]
    (verdict,) = logged.verdicts
    assert logged.report == verdict.report == "$PRIVATE_KEY" and verdict.messages[0]["content"] == "$PRIVATE_KEY ?"


def make_call(tokens: int = 0, money: float = 0.0, time: float = 0.0) -> ModelCall:
    return ModelCall("p0.r0.b0.i0/proposer/turn0", "proposer", "policy", "", 0, time, tokens=tokens, money=money)


def make_budget(pool: Pool, *earlier: ModelCall, **limits: Any) -> Budget:
    for call in earlier:
        pool.append(call)
    return Budget(EvolvingBudget(**limits), pool, pool.path.with_name("STOP"))


async def reserve(budget: Budget, usage: Usage) -> None:
    async with budget.reserve(usage):
        pass


def test_maximum_of_a_call_is_blocked_until_it_has_ended(tmp_path: Path) -> None:
    async def script(pool: Pool) -> None:
        budget = make_budget(pool, make_call(30), tokens=100)
        async with budget.reserve(Usage(1, 65)):
            waiting = asyncio.ensure_future(reserve(budget, Usage(1, 20)))
            await asyncio.sleep(0)
            assert not waiting.done(), "a call in flight may return budget"
            pool.append(make_call(25))
        await waiting
        with pytest.raises(EvolutionStopped, match=r"budget\.tokens=100 is spent"):
            await reserve(budget, Usage(1, 46))

    with Pool(tmp_path) as pool:
        asyncio.run(script(pool))


@pytest.mark.parametrize(
    ("limit", "value", "usage"), [("calls", 2, Usage(1)), ("money", 0.5, Usage(1, 0, 0.11)), ("seconds", 100, Usage(1))]
)
def test_calls_money_and_seconds(tmp_path: Path, limit: str, value: float, usage: Usage) -> None:
    with Pool(tmp_path) as pool:
        budget = make_budget(pool, make_call(money=0.4), make_call(time=100.0), **{limit: value})
        assert budget.seconds >= 100.0
        with pytest.raises(EvolutionStopped, match=f"budget.{limit}={value:g} is spent"):
            asyncio.run(reserve(budget, usage))


COUNTS = [(3, 0, True), (2, 1, True), (2, 1, False), (0, 3, False)]
JUDGEMENTS = [(Judgement("", votes_for, votes_against, ""), right) for votes_for, votes_against, right in COUNTS]


def test_votes_and_area_under_curve() -> None:
    calibration = compute_calibration(JUDGEMENTS)
    assert calibration is not None
    counts = {"true_positive": 5, "false_positive": 2, "false_negative": 1, "true_negative": 4}
    assert (calibration["single"], calibration["candidates"]) == (counts, 4)
    assert calibration["auc"] == 3.5 / 4  # three pairs in order, one tie
    one_kind = compute_calibration(JUDGEMENTS[:2])
    assert one_kind is not None and math.isnan(one_kind["auc"])
    assert compute_calibration([(Judgement("", 0, 0, ""), True)]) is None, "without votes"


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_pools_of_earlier_formats(archive: Path, tmp_path: Path) -> None:
    with unpack(archive, tmp_path) as runs:
        if (runs / "rl/recorded/step_000002/groups.msgpack").is_file():  # formats before 2
            with pytest.raises(ValueError, match="use the version that wrote it"):
                Pool(runs / "evolution")
        else:
            assert len(Pool(runs / "evolution").candidates) == 2


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    set_format(tmp_path, FORMAT + 1)
    with pytest.raises(ValueError, match=rf"{tmp_path} has format {FORMAT + 1}, .* 9\.8\.7"):
        export_training_rows(tmp_path, tmp_path / "out", "truth", 1)
