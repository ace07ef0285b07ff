"""Advantage estimators: one module per estimator or family, registered on import."""

from alphaapollo.algorithms.advantages import (  # noqa: F401  # noqa: F401
    gae,
    gdpo,
    gigpo,
    gpg,
    grpo,
    magistral,
    none,
    opo,
    passk,
    reinforce_pp,
    remax,
    rloo,
)
from alphaapollo.algorithms.advantages.base import (
    AdvantageInputs,
    Advantages,
    Estimator,
    Turns,
    estimator_names,
    get_estimator,
    register_estimator,
)

__all__ = [
    "AdvantageInputs",
    "Advantages",
    "Estimator",
    "Turns",
    "estimator_names",
    "get_estimator",
    "register_estimator",
]
