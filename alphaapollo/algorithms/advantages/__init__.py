"""Advantage estimators: one module per family, registered on import."""

from alphaapollo.algorithms.advantages import gae, grpo, turns  # noqa: F401
from alphaapollo.algorithms.advantages.base import AdvantageInputs as AdvantageInputs
from alphaapollo.algorithms.advantages.base import Advantages as Advantages
from alphaapollo.algorithms.advantages.base import Estimator as Estimator
from alphaapollo.algorithms.advantages.base import Trajectories as Trajectories
from alphaapollo.algorithms.advantages.base import Turns as Turns
from alphaapollo.algorithms.advantages.base import estimator_names as estimator_names
from alphaapollo.algorithms.advantages.base import get_estimator as get_estimator
from alphaapollo.algorithms.advantages.base import register_estimator as register_estimator
