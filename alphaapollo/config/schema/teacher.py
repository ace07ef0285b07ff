"""`teacher`: a frozen model that the policy learns from on its own samples (docs/algorithms/distill.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from alphaapollo.config.schema.base import CHANGES_TEACHER, ActiveWhen, FilePath, Section
from alphaapollo.config.schema.model import FrozenFsdp

Distance = Literal["sampled", "reverse", "forward", "jsd"]
WHEN_TEACHER = ActiveWhen("divergence")


class TeacherModel(Section):
    path: Annotated[str, CHANGES_TEACHER, FilePath("model", required=True)] = ""
    """Hugging Face hub id, or local folder with config, weights and the policy's tokenizer (required with a
    divergence)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    fsdp_config: FrozenFsdp = FrozenFsdp()


class Teacher(Section):
    divergence: Annotated[Distance | None, CHANGES_TEACHER] = None
    """Divergence to minimize; null = no teacher. sampled = reverse KL on the sampled tokens, as a policy gradient. Over
    the full vocabulary: reverse KL(policy||teacher), forward KL(teacher||policy), or jsd, the generalized
    Jensen-Shannon divergence (arXiv 2306.13649)."""
    coef: Annotated[PositiveFloat, WHEN_TEACHER] = 1.0
    """Weight of the divergence in the loss, which also has terms for advantages, KL and entropy."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0), WHEN_TEACHER, ActiveWhen("divergence", "jsd"), CHANGES_TEACHER] = 0.5
    """jsd: the teacher's share of the mixture; near 0 it behaves as the forward KL, near 1 as the reverse."""
    model: Annotated[TeacherModel, WHEN_TEACHER] = TeacherModel()

    @property
    def uses_sampled_tokens(self) -> bool:
        """Whether the distillation loss needs only the teacher's log-probs of the sampled tokens."""
        return self.divergence == "sampled"

    @property
    def uses_full_vocabulary(self) -> bool:
        """Whether the distillation loss compares the distributions of policy and teacher over the full vocabulary."""
        return self.divergence not in (None, "sampled")


NO_TEACHER = Teacher()
