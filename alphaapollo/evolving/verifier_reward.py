"""Reward function for training a verifier on verifier.parquet, which alphaapollo.evolving.export writes."""

from __future__ import annotations

from alphaapollo.evolving.roles import ModelReply, Verifier
from alphaapollo.types import Outcome, Prompt, Score


def compute_score(prompt: Prompt, completion: str) -> Score:
    """Return score 1 if the verdict in the completion is correct, else 0; without a verdict, WRONG_FORMAT."""
    report = Verifier().read(ModelReply(completion))
    if report is None:
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no line 'VERDICT: right' or 'VERDICT: wrong'")
    correct = float(report.vote == (prompt.ground_truth == "right"))
    return Score(correct, {"accuracy": correct})
