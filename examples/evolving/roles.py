"""The verifiers of the example: one that the model was taught to be, and a coin."""

from __future__ import annotations

from alphaapollo.evolving.roles import ModelReply, RoleView, Verifier, VerifierReport, register_role, user
from alphaapollo.types import Message
from alphaapollo.utils.seeds import derive_seed
from examples.evolving.task import to_check


@register_role("checker")
class Checker(Verifier):
    """Asks in the words of the warm-up. The report is the carries that were checked."""

    def build(self, view: RoleView) -> list[Message]:
        return user(to_check(view.question, view.solution))

    def read(self, reply: ModelReply) -> VerifierReport | None:
        *checks, verdict = reply.text.split() or [""]
        return VerifierReport(verdict == "yes", " ".join(checks)) if verdict in ("yes", "no") else None


@register_role("coin")
class Coin(Verifier):
    """Votes by the call's seed: whatever the model says, and whatever it is asked."""

    def build(self, view: RoleView) -> list[Message]:
        return user("heads?")

    def read(self, reply: ModelReply) -> VerifierReport | None:
        return VerifierReport(derive_seed(reply.seed, "coin") % 2 == 0, "")
