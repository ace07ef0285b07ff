"""Verifiers of the example: one with the prompt that the model was trained on, and one with random votes."""

from __future__ import annotations

from alphaapollo.plugins.evolving.roles import (
    ModelReply,
    RoleView,
    Verifier,
    VerifierReport,
    make_user_chat,
    register_role,
)
from alphaapollo.types import Message
from alphaapollo.utils.seeds import derive_seed
from examples.evolving.task import check_prompt


@register_role("checker")
class Checker(Verifier):
    """Uses the prompt of the training data. The report consists of the checked carries."""

    def build(self, view: RoleView) -> list[Message]:
        return make_user_chat(check_prompt(view.question, view.solution))

    def read(self, reply: ModelReply) -> VerifierReport | None:
        *checks, verdict = reply.text.split() or [""]
        return VerifierReport(verdict == "yes", " ".join(checks)) if verdict in ("yes", "no") else None


@register_role("coin")
class Coin(Verifier):
    """Votes by the call's seed and ignores the reply."""

    def build(self, view: RoleView) -> list[Message]:
        return make_user_chat("heads?")

    def read(self, reply: ModelReply) -> VerifierReport | None:
        return VerifierReport(derive_seed(reply.seed, "coin") % 2 == 0, "")
