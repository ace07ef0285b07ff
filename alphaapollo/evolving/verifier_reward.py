"""Reward function for training a verifier on the verifier.parquet of export.py."""

from __future__ import annotations

from alphaapollo.evolving.roles import ModelReply, Verifier
from alphaapollo.types import Outcome, Prompt, Score


def compute_score(prompt: Prompt, completion: str) -> Score:
    """Score 1 if the verdict matches the ground truth, else 0; wrong format without a verdict."""
    report = Verifier().read(ModelReply(completion))
    if report is None:
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no line 'VERDICT: right' or 'VERDICT: wrong'")
    correct = float(report.vote == (prompt.ground_truth == "right"))
    return Score(correct, {"accuracy": correct})
