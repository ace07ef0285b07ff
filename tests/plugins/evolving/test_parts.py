"""Roles, votes, memory and selection on hand-written records."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.plugins.evolving.evolution import list_majority_reports, select_past_solutions
from alphaapollo.plugins.evolving.pool import Candidate, Judgement, Pool, Position, Verdict
from alphaapollo.plugins.evolving.roles import (
    ModelReply,
    PastSolution,
    Proposer,
    RoleView,
    Summariser,
    Verifier,
    VerifierReport,
)
from alphaapollo.types import Message


def candidate(round: int, summary: str, answer: str | None = None, failure: str = "") -> Candidate:
    position = Position(0, round, 0, 0)
    return Candidate(position.key, position, "m", summary=summary, answer=answer, failure=failure)


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("All is well.\nVERDICT: right", VerifierReport(True, "All is well.")),
        ("<think>VERDICT: right</think>Line 2 fails.\n**Verdict: WRONG**\n", VerifierReport(False, "Line 2 fails.")),
        ("VERDICT: wrong\nno, wait\nVERDICT: right", VerifierReport(True, "no, wait")),
        ("The verdict: right or wrong?", None),
        ("", None),
        ("VERDICT: perhaps", None),
    ],
)
def test_verifier_reports_are_read_strictly(text: str, report: VerifierReport | None) -> None:
    assert Verifier().read(ModelReply(text)) == report


def test_other_roles_read() -> None:
    assert Summariser().read(ModelReply("<think>hm</think><answer>It is 4.</answer>")) == "It is 4."
    assert Summariser().read(ModelReply("<think>hm</think>")) is None


def test_proposer_prompt_has_past_solutions() -> None:
    asked = (Message(role="system", content="s"), Message(role="user", content="2+2?"))
    assert Proposer().build(RoleView("2+2?", asked)) == list(asked)
    system, user = Proposer().build(RoleView("2+2?", asked, past=(PastSolution("It is 5.", 1, 2, "No."),)))
    assert system == asked[0]
    for part in ("2+2?", "It is 5.", "1 of 3 reviewers say it is right", "No."):
        assert part in user["content"]


def test_reports_of_the_majority() -> None:
    fine, bad = Verdict("m", vote=True, report="fine"), Verdict("m", vote=False, report="bad")
    verdicts = [fine, bad, fine, Verdict("m", failure="no report")]
    assert list_majority_reports(verdicts) == ["fine"]
    assert list_majority_reports(verdicts[1:3]) == ["bad"], "a tie counts as against"
    assert list_majority_reports([]) == []


def test_memory_and_choice_rank_by_votes_and_brevity(tmp_path: Path) -> None:
    made = [("long and right", (3, 0)), ("right", (3, 0)), ("no", (0, 3)), ("late and right", (3, 0))]
    with Pool(tmp_path) as pool:
        for number, (summary, votes) in enumerate(made):
            one = candidate(number, summary)
            pool.append(one)
            pool.append(Judgement(one.key, *votes, "report"))
        pool.append(candidate(4, "", failure="gone"))
    past = select_past_solutions(pool, 0, 3, 2, "score")
    assert [one.summary for one, _ in past] == ["right", "no"]  # the newest is always included
    assert [one.summary for one, _ in select_past_solutions(pool, 0, 4, 2, "simple")] == ["no", "late and right"]
    assert select_past_solutions(pool, 0, 4, 0, "simple") == [] and select_past_solutions(pool, 0, 0, 3, "simple") == []
    assert [one.summary for one in pool.rank_candidates(0, 1)] == ["long and right"]
    ranked = ["right", "long and right", "late and right", "no"]
    assert [one.summary for one in pool.rank_candidates(0)] == ranked and pool.rank_candidates(5) == []
