"""Exclude tokens from sampling, in a rollout engine and in the server of `alphaapollo serve`: ids of the embedding that
the tokenizer lacks, and placeholders of images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from alphaapollo.data.images import EXCLUDED_LOGIT
from alphaapollo.data.vocabulary import find_excluded_ids
from alphaapollo.engines.vllm.settings import VllmObject


def exclude_from_logits(model: VllmObject, token_ids: Sequence[int], device: torch.device) -> None:
    """Make a loaded vLLM model return EXCLUDED_LOGIT as logit of `token_ids`, so that they are never sampled."""
    ids = torch.tensor(token_ids, dtype=torch.long, device=device)
    compute_logits = model.compute_logits

    def compute_logits_without_excluded(*arguments: object, **options: object) -> torch.Tensor | None:
        logits = compute_logits(*arguments, **options)
        if logits is not None:  # None on other tensor-parallel ranks
            logits.index_fill_(1, ids, EXCLUDED_LOGIT)
        return logits

    model.compute_logits = compute_logits_without_excluded


class ExcludedTokens(LogitsProcessor):
    """Logits processor of vLLM's server."""

    def __init__(self, vllm_config: VllmObject, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        ids = find_excluded_ids(model.model, str(model.tokenizer), model.trust_remote_code)
        self._ids = torch.tensor(ids, dtype=torch.long, device=device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(1, self._ids, EXCLUDED_LOGIT)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing: the excluded tokens do not depend on the requests."""
