"""`teacher`: models that the policy learns from on its own samples: frozen ones (docs/algorithms/distill.md), or the
policy itself with more context (docs/algorithms/distill.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import CHANGES_TEACHER, ActiveUnless, ActiveWhen, FilePath, Ratio, Requires, Section
from alphaapollo.config.schema.model import FrozenFsdp

Distance = Literal["sampled", "reverse", "forward", "jsd"]
TEACHER_SHARES = "teacher_shares"
"""Column of a row: the weight of each teacher in its loss, in the order of Teacher.models_by_key."""
WHEN_TEACHER = ActiveWhen("divergence")
WHEN_LOCAL, WHEN_SERVER = ActiveUnless("base_url"), ActiveWhen("base_url")
WHEN_SELF, UNLESS_SELF = ActiveWhen("context"), ActiveUnless("self_teacher.context")
WHEN_FEEDBACK, WHEN_DEMONSTRATION = ActiveWhen("context", "feedback"), ActiveWhen("context", "demonstration")


def _check_template(template: str) -> str:
    if missing := [name for name in ("{question}", "{context}") if name not in template]:
        raise ValueError(f"the template lacks {' and '.join(missing)}. Add what is missing.")
    return template


Template = Annotated[str, AfterValidator(_check_template)]


class TeacherModel(Section):
    """Teacher on the policy's ranks (`path`) or behind a vLLM server (`base_url` and `name`)."""

    path: Annotated[str, CHANGES_TEACHER, FilePath("model", required=True), WHEN_LOCAL] = ""
    """Hugging Face hub id, or local folder with config, weights and the policy's tokenizer (required with a divergence,
    unless base_url is set)."""
    trust_remote_code: Annotated[bool, WHEN_LOCAL] = False
    """Run Python code that comes with the model."""
    fsdp_config: Annotated[FrozenFsdp, WHEN_LOCAL] = FrozenFsdp()
    base_url: Annotated[str, CHANGES_TEACHER] = ""
    """URL of a vLLM server, e.g. http://localhost:8000/v1; empty = the teacher runs on the policy's ranks."""
    name: Annotated[str, CHANGES_TEACHER, WHEN_SERVER] = ""
    """Name of the model on that server (required with base_url)."""
    api_key_env: Annotated[str, WHEN_SERVER] = "OPENAI_API_KEY"
    """Environment variable with the API key; if unset, the key is `none`."""
    timeout: Annotated[PositiveFloat, WHEN_SERVER] = 120.0
    """Seconds per request. Failed requests are sent again for five minutes; then the run stops."""

    def find_problems(self) -> Iterator[str]:
        if self.base_url and not self.name:
            yield "name is required with base_url. Set the name of the model on the server."


class SelfTeacher(Section):
    context: Annotated[
        Literal["feedback", "demonstration"] | None,
        Requires(ActiveWhen("/env.context", "append")),
        Requires(ActiveUnless("/env.env_name", "agent")),
        Requires(ActiveUnless("/teacher.divergence", "sampled"), fix="teacher.divergence=jsd, reverse or forward"),
        Requires(ActiveWhen("/teacher.models", {}), fix="teacher.models={}"),
        Requires(ActiveWhen("/reward_model.enable", False), when="feedback"),
        CHANGES_TEACHER,
    ] = None
    """What the teacher reads in addition to the prompt; null = the teacher is another model. feedback = a successful
    sample of the same group, or else feedback of grader or environment (SDPO). demonstration = a text of the data row
    (SDFT)."""
    ema_rate: Annotated[Ratio, WHEN_SELF, CHANGES_TEACHER] = 0.05
    """The policy's share in the teacher's weights after each optimizer step: teacher = (1 - ema_rate) teacher +
    ema_rate policy. 0 = initial model, 1 = current policy."""
    max_ratio: Annotated[PositiveFloat | None, WHEN_SELF] = None
    """Weight the divergence at a token by its ratio of new to old probability, at most max_ratio; null = weight 1."""
    min_reward: Annotated[float, WHEN_FEEDBACK] = 0.5
    """Reward from which a sample is successful."""
    demonstration_key: Annotated[str, WHEN_DEMONSTRATION] = "demonstration"
    """Key in extra_info, or column, with the demonstration."""
    max_prompt_length: Annotated[PositiveInt | None, WHEN_SELF] = None
    """Maximum tokens of the teacher's prompt; a row with a longer one is not trained on. null =
    data.max_prompt_length + data.max_response_length."""
    solution_template: Annotated[Template, WHEN_FEEDBACK] = (
        "{question}\n\nCorrect solution:\n\n{context}\n\nCorrectly solve the original question."
    )
    """The teacher's last user message, with a successful sample as context."""
    feedback_template: Annotated[Template, WHEN_FEEDBACK] = (
        "{question}\n\nThe following is feedback from your unsuccessful earlier attempt:\n\n{context}\n\n"
        "Correctly solve the original question."
    )
    """The teacher's last user message, with feedback as context."""
    demonstration_template: Annotated[Template, WHEN_DEMONSTRATION] = (
        "{question}\n\nThis is an example for a response to the question:\n\n{context}\n\n"
        "Now answer with a response of your own, including the thinking process."
    )
    """The teacher's last user message, with a demonstration as context."""


class Teacher(Section):
    divergence: Annotated[Distance | None, CHANGES_TEACHER] = None
    """Divergence to minimize; null = no teacher. sampled = reverse KL on the sampled tokens, as a policy gradient. Over
    the full vocabulary: reverse KL(policy||teacher), forward KL(teacher||policy), or jsd, the generalized
    Jensen-Shannon divergence (arXiv 2306.13649)."""
    coef: Annotated[PositiveFloat, WHEN_TEACHER] = 1.0
    """Weight of the divergence in the loss, which also has terms for advantages, KL and entropy."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0), WHEN_TEACHER, ActiveWhen("divergence", "jsd"), CHANGES_TEACHER] = 0.5
    """jsd: the teacher's share of the mixture; near 0 it behaves as the forward KL, near 1 as the reverse."""
    top_k: Annotated[PositiveInt | None, ActiveWhen("divergence", "reverse", "forward", "jsd"), CHANGES_TEACHER] = None
    """Compare only the teacher's k most probable tokens; all other tokens count as one (required for servers, which
    allow up to vLLM's --max-logprobs, by default 20), with a self_teacher the policy's. null = the full vocabulary."""
    self_teacher: Annotated[SelfTeacher, WHEN_TEACHER] = SelfTeacher()
    model: Annotated[TeacherModel, WHEN_TEACHER, UNLESS_SELF, ActiveUnless("models")] = TeacherModel()
    models: Annotated[dict[str, TeacherModel], WHEN_TEACHER, UNLESS_SELF, CHANGES_TEACHER] = {}
    """Several teachers by name, instead of `model`: {math: {path: ...}, code: {base_url: ..., name: ...}}."""
    by_source: Annotated[dict[str, str | dict[str, PositiveFloat]], ActiveWhen("models"), CHANGES_TEACHER] = {}
    """Teacher of each data source: {pattern: name}, or {pattern: {name: weight, ...}} with weights that sum to 1. The
    first pattern that matches the data_source is used: {"openai/gsm8k": math, "code/*": {math: 0.5, code: 0.5}}."""

    @property
    def uses_sampled_tokens(self) -> bool:
        """Whether the distillation loss needs only the teacher's log-probs of the sampled tokens."""
        return self.divergence == "sampled"

    @property
    def uses_full_vocabulary(self) -> bool:
        """Whether the distillation loss compares the distributions of policy and teacher over the full vocabulary."""
        return self.divergence not in (None, "sampled")

    @property
    def uses_self_teacher(self) -> bool:
        """Whether the teacher is the policy with more context, instead of other models."""
        return self.divergence is not None and self.self_teacher.context is not None

    @property
    def models_by_key(self) -> dict[str, TeacherModel]:
        """Teachers by their configuration key, e.g. {"teacher.models.math": ...}; empty without a divergence, and with
        a self-teacher."""
        if self.divergence is None or self.uses_self_teacher:
            return {}
        return {f"teacher.models.{name}": model for name, model in self.models.items()} or {"teacher.model": self.model}

    @property
    def local_models(self) -> dict[str, TeacherModel]:
        """The teachers of models_by_key that run on the policy's ranks."""
        return {key: model for key, model in self.models_by_key.items() if not model.base_url}

    @property
    def servers(self) -> dict[str, TeacherModel]:
        """The teachers of models_by_key behind a server."""
        return {key: model for key, model in self.models_by_key.items() if model.base_url}

    def find_shares(self, data_source: str) -> list[float]:
        """Return the weight of each teacher, in the order of `models_by_key`, for prompts of a data source.

        The weights sum to 1; they are all 0 if no pattern matches.
        """
        if not self.models:
            return [1.0]
        matching = (value for key, value in self.by_source.items() if fnmatchcase(data_source.lower(), key.lower()))
        chosen = next(matching, {})
        weights = {chosen: 1.0} if isinstance(chosen, str) else chosen
        return [weights.get(name, 0.0) for name in self.models]

    def find_problems(self) -> Iterator[str]:
        if self.models and not self.by_source:
            yield f"models needs by_source. Set by_source={{*: {min(self.models)}}} or patterns of data sources."
        for name, model in self.models.items():
            if not (model.path or model.base_url):
                yield f"models.{name} has no model. Set models.{name}.path, or base_url and name of a server."
        for pattern, chosen in self.by_source.items():
            names, total = ([chosen], 1.0) if isinstance(chosen, str) else ([*chosen], math.fsum(chosen.values()))
            if unknown := [name for name in names if name not in self.models]:
                known = ", ".join(self.models) or "none"
                yield f"by_source: {pattern!r} names the teacher {unknown[0]!r}. Use a name in models ({known})."
            if abs(total - 1.0) > 1e-6:
                yield f"by_source: the weights of {pattern!r} sum to {total:g}. Set weights that sum to 1."
        if self.servers and self.uses_full_vocabulary and self.top_k is None:
            yield (
                f"top_k is required: the server of {next(iter(self.servers))} cannot return full distributions. "
                "Set top_k=20, or divergence=sampled."
            )


NO_TEACHER = Teacher()
