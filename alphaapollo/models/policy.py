"""The policy as an FSDP root: rows in, log-probs of their response tokens out.

token ids -> trunk (decoder layers) -> states that predict response tokens [n, H] -> head, in chunks -> [n]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from alphaapollo.algorithms import sampling
from alphaapollo.data.batch import Rows
from alphaapollo.models.attention.backends import is_ours
from alphaapollo.models.decoder import response_states
from alphaapollo.models.lm_head import Head, Hidden, Other, TokenStats, token_stats
from alphaapollo.models.micro_batch import MicroBatch, build_micro_batch
from alphaapollo.models.moe_routing import Routers
from alphaapollo.models.ulysses import SequenceGroup

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Mean |difference| of the self-check in nats. Bfloat16 has steps of 0.125 near 30, where logits may be, and the check's
# tokens are made up: there a large difference may be rounding, so it is told, and only a huge one ends the run.
LIMIT = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1.0}
DOUBTFUL = 0.1


class PolicyModel(nn.Module):
    """A causal language model whose forward pass gives log-probs. Parameter names: the model's own, after `model.`."""

    forward_methods = ("hidden", "native_logprobs", "next_logits")  # besides forward: FSDP gathers parameters for these

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.scale, self.softcap = logit_transform(model.config)
        self.routers = Routers.of(model)  # of a mixture of experts

    def forward(
        self, micro: MicroBatch, temperature: float, need_entropy: bool = False, other: Other | None = None
    ) -> TokenStats:
        """Statistics [n] of the response tokens at `temperature`; `other` adds the divergence from it."""
        hidden = self._hidden(micro)
        own = token_stats(hidden.states, micro.targets, hidden.head, temperature, need_entropy, other)
        if micro.sequence is None:
            return own
        there = {name: column for name, column in own._asdict().items() if column is not None}
        whole = micro.gather(torch.stack(list(there.values())), micro.states)
        return own._replace(**{name: row.clone() for name, row in zip(there, whole, strict=True)})  # no views, for FSDP

    def hidden(self, micro: MicroBatch) -> Hidden:
        """The states before each of this rank's response tokens, and the head that reads them."""
        return self._hidden(micro)

    def _hidden(self, micro: MicroBatch) -> Hidden:
        output = self.model.get_output_embeddings()
        head = Head(output.weight, output.bias, self.scale, self.softcap)
        if self.routers is None:
            return Hidden(response_states(self.model.base_model, micro), head)
        self.routers.begin(micro.is_real, micro.routed_experts)
        states = response_states(self.model.base_model, micro)
        self.routers.end()
        return Hidden(states, head)

    def native_logprobs(self, token_ids: Tensor) -> Tensor:
        """Log-probs of tokens 1 .. T-1 by the model's own forward pass and eager attention. [1, T] -> [T - 1]."""
        attention = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        if self.routers is not None:
            self.routers.forget()
        logits = self.model(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
        self.model.set_attn_implementation(attention)
        return logits.log_softmax(dim=-1).gather(1, token_ids[0, 1:, None])[:, 0]

    def next_logits(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """As models.decode has it; only inside `generation_mode`."""
        if self.routers is not None:
            self.routers.forget()
        return sampling.next_logits(self.model, tokens, mask, positions, cache)

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        """Attention of transformers, which knows padding and caches; no layer that recomputes its activations, for such
        a layer keeps no cache; and none that is compiled, for these shapes never come again."""
        attention = self.model.config._attn_implementation
        recomputing = [module for module in self.model.modules() if module.training]
        if is_ours(self.model):
            self.model.set_attn_implementation(_cached_attention(self.model))
        for module in recomputing:
            module.training = False
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for module in recomputing:
                module.training = True
            self.model.set_attn_implementation(attention)


def _cached_attention(model: PreTrainedModel) -> str:
    """The quicker one, unless it leaves something out: of caps on scores it knows nothing."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not capped else "eager"


def logit_transform(config: PretrainedConfig) -> tuple[float, float | None]:
    """(scale, softcap) that the model applies to the head's output; see lm_head.Head."""
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere; Falcon-H1; Muse
        scale *= getattr(text, name, None) or 1.0
    scale /= getattr(text, "logits_scaling", None) or 1.0  # Granite
    return scale, getattr(text, "final_logit_softcapping", None)  # Gemma


@torch.no_grad()
def check_logprobs(
    policy: PolicyModel,
    padded: bool,
    dtype: torch.dtype,
    device: torch.device,
    sequence: SequenceGroup | None = None,
) -> float:
    """Compare log-probs of two short rows with the model's own; the mean difference in nats. A collective of all ranks.

    Finds a head that does more to its logits than we know of, an attention that we do not compute, packed rows that see
    each other, and layers that ranks cannot share. Raises ValueError.
    """
    vocabulary = policy.model.config.get_text_config().vocab_size
    texts = [(np.arange(length) * 37 + 11) % vocabulary for length in (9, 6)]
    rows = Rows(
        token_ids=np.concatenate(texts),
        lengths=np.array([9, 6]),
        response_starts=np.array([1, 1]),
        action_mask=np.ones(13, dtype=np.uint8),
        rollout_logprobs=np.zeros(13, dtype=np.float32),
    )
    ours = policy(build_micro_batch(rows, [0, 1], padded, device, sequence=sequence), 1.0).logprobs
    own = torch.cat([policy.native_logprobs(torch.from_numpy(text)[None].to(device)) for text in texts])
    if not own.isfinite().all():
        raise ValueError(
            f"{type(policy.model).__name__}: the model's own log-probs are not finite: its weights are damaged, or too "
            "large for this dtype. Take a sound copy, or model.dtype=float32."
        )
    gap = float((ours - own).abs().mean())
    if not gap <= LIMIT[dtype]:
        raise ValueError(
            f"{type(policy.model).__name__}: our log-probs differ from the model's own by {gap:.2g} nats on average. "
            "Its head or its attention does something that this project does not know; try model.attention=padded, "
            "or choose another model."
        )
    return gap


def self_check_warnings(gap: float) -> list[str]:
    """What to say of a self-check that has passed."""
    if gap <= DOUBTFUL:
        return []
    return [
        f"in bfloat16 the trainer's log-probs differ from the model's own by {gap:.2g} nats on average over made-up "
        "tokens. That may be rounding; to know, run one iteration with model.dtype=float32, which ends where they "
        "really differ."
    ]
