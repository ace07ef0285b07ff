"""Reward function for training a verifier on verifier.parquet, which alphaapollo.plugins.evolving.export writes."""

from __future__ import annotations

from alphaapollo.plugins.evolving.roles import ModelReply, Verifier
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.types import Prompt, Score


def compute_score(prompt: Prompt, completion: str) -> Score:
    """Return score 1 if the verdict in the completion is correct, else 0; without a verdict, WRONG_FORMAT."""
    report = Verifier().read(ModelReply(completion))
    if report is None:
        return make_wrong_format_score("no line 'VERDICT: right' or 'VERDICT: wrong'")
    return make_accuracy_score(report.vote == (prompt.ground_truth == "right"))
