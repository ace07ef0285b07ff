"""A case: random episodes, a pair of estimator and loss with random settings, and views that must agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import Config
from tests.invariance.episodes import Episodes
from tests.invariance.settings import draw_config
from tests.invariance.table import Descent, Outcome, Table
from tests.invariance.views import TokenLogProbs, View, prepare

BASE = View("append, packed, one rank, one micro-batch")


@dataclass(frozen=True)
class Name:
    """Identity of a case, from which any process can draw it."""

    seed: int
    number: int
    estimator: str
    loss: str

    def __str__(self) -> str:
        return f"case {self.number}, {self.estimator} x {self.loss}"


@dataclass(frozen=True)
class Case:
    episodes: Episodes
    logprobs: TokenLogProbs
    table: Table
    config: Config
    estimator: str  # names, because the objects cannot be sent to another process
    loss: str
    views: list[View]

    @classmethod
    def draw(cls, name: Name) -> Case:
        estimator, loss = get_estimator(name.estimator), get_policy_loss(name.loss)
        closed_form = bool(estimator.no_shaping_reason) and "components" not in estimator.needs
        generator = np.random.default_rng([name.seed, name.number])
        episodes = Episodes.draw(generator, plain=closed_form)
        logprobs = TokenLogProbs.draw(generator, episodes.num_tokens)
        one_step = bool(generator.random() < 0.5)
        return cls(
            episodes,
            logprobs,
            Table.draw(generator, logprobs.old),
            draw_config(generator, estimator, loss, episodes, one_step),
            name.estimator,
            name.loss,
            _views(generator, one_step),
        )

    def outcome(self, view: View) -> Outcome:
        """Outcome with the table in place of the model."""

        def make():
            return prepare(view, self.episodes, self.logprobs, self.config, get_estimator(self.estimator))

        return Descent(view, self.table, self.config, get_policy_loss(self.loss)).run(make, self.episodes.num_tokens)


def _views(generator: np.random.Generator, one_step: bool) -> list[View]:
    """Views of the case. Shuffled samples would be in other mini-batches, so only cases with one mini-batch have it."""
    budgets = generator.integers(1, 150, 3).tolist()
    views = [
        View("memory", "memory"),
        View("padded, small micro-batches", padded=True, max_tokens=budgets[0]),
        View("memory, two ranks, small micro-batches", "memory", num_ranks=2, max_tokens=budgets[1]),
        View("resumed in the middle", resumed=True),
        View("shared, small micro-batches", shared=True, max_tokens=budgets[0]),
        View("memory, shared, two ranks", "memory", num_ranks=2, shared=True, max_tokens=budgets[2]),
        View("shared, two ranks, without zero advantages", num_ranks=2, shared=True, skips=True, max_tokens=budgets[1]),
    ]
    if one_step:
        order = int(generator.integers(2**31))
        views += [View("memory, three ranks, shuffled", "memory", True, 3, budgets[2], order)]
    return views
