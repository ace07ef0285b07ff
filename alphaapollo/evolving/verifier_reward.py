"""The reward of a verifier in training, on rows that export.py writes."""

from __future__ import annotations

from alphaapollo.evolving.asker import Said
from alphaapollo.evolving.roles import Verifier
from alphaapollo.types import Outcome, Prompt, Score


def compute_score(prompt: Prompt, completion: str) -> Score:
    """1 for the verdict that is true, else 0."""
    report = Verifier().read(Said(completion, 0))
    if report is None:
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "there is no line 'VERDICT: right' or 'wrong'")
    true = float(report.vote == (prompt.ground_truth == "right"))
    return Score(true, {"accuracy": true})
