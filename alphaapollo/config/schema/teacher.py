"""`teacher`: a frozen model that the policy learns from on its own samples (docs/algorithms/distill.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.model import FrozenFsdp

Distance = Literal["sampled", "reverse", "forward", "jsd"]


class TeacherModel(Section):
    path: str = ""
    """Hugging Face hub id or a local folder with config, weights and the policy's tokenizer (required with a
    divergence)."""
    trust_remote_code: bool = False
    """Run the Python code that its folder brings along."""
    fsdp_config: FrozenFsdp = FrozenFsdp()


class Teacher(Section):
    divergence: Distance | None = None
    """What of policy and teacher is made small; null = no teacher. sampled: the reverse KL by the tokens that the
    policy sampled, as a policy gradient. Over the whole vocabulary: reverse KL(policy||teacher), forward
    KL(teacher||policy), jsd, the generalised Jensen-Shannon divergence (arXiv 2306.13649)."""
    coef: PositiveFloat = 1.0
    """Its weight beside what else is learnt: the advantages of algorithm.adv_estimator, KL and entropy."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """jsd: the teacher's share of the mixture; near 0 it goes as the forward KL, near 1 as the reverse."""
    model: TeacherModel = TeacherModel()

    @property
    def sampled(self) -> bool:
        """Log-probs of the sampled tokens are enough."""
        return self.divergence == "sampled"

    @property
    def whole(self) -> bool:
        """Whole distributions are compared, inside the update."""
        return self.divergence not in (None, "sampled")


NO_TEACHER = Teacher()
