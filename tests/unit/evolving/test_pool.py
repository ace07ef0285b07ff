from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.evolving.pool import (
    FILE,
    Candidate,
    Grade,
    Judgement,
    ModelCall,
    Pool,
    Position,
    Record,
    Usage,
    Verdict,
)
from alphaapollo.types import Message, Outcome

PLACE = Position(17, 2, 0, 1)
MESSAGES = (Message(role="user", content="2+2?"), Message(role="assistant", content="4"))
RECORDS: list[Record] = [
    ModelCall("p17.r2.b0.i1/proposer/turn0", "proposer", "policy", "ab", 2**62, 1.5, 0.5, "4", 10, 5, 0.25, "stop"),
    ModelCall("p17.r2.b0.i1/verifier.0/ask0.turn0", "verifier", "policy", "cd", 1, 2.5, 0.5, failure="status 503"),
    Candidate(
        PLACE.key, PLACE, "policy", ("p17.r1.b0.i0",), MESSAGES, 1, "4", "4", "4", Grade(Outcome.SCORED, 1.0, 1.0)
    ),
    Judgement(
        PLACE.key,
        2,
        1,
        "good",
        (Verdict("policy", failure="no result"), Verdict("policy", MESSAGES[:1], True, "good")),
    ),
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


def test_failed_grade_is_not_a_wrong_answer(tmp_path: Path) -> None:
    grade = Grade(Outcome.GRADER_FAILED, None, None, "it crashed")
    with Pool(tmp_path) as pool:
        pool.append(Candidate(PLACE.key, PLACE, "policy", grade=grade))
    assert Pool(tmp_path).candidates[PLACE.key].is_right is None


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
