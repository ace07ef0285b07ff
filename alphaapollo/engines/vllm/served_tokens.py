"""Tokens that `alphaapollo serve` never samples: those of the embeddings that the tokenizer lacks, as in an engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from alphaapollo.data.images import EXCLUDED_LOGIT
from alphaapollo.data.vocabulary import find_excluded_ids


class ExcludedTokens(LogitsProcessor):
    """Logits processor of vLLM's server."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        ids = find_excluded_ids(model.model, str(model.tokenizer), model.trust_remote_code)
        self._ids = torch.tensor(ids, dtype=torch.long, device=device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(1, self._ids, EXCLUDED_LOGIT)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The excluded tokens do not depend on the requests."""
