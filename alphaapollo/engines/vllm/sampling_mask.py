"""Sampling masks of vLLM: the tokens that its sampler kept with top-p, top-k and min-p.

On GPUs, vLLM's V2 model runner returns them itself (`return_sampling_mask`). On CPUs, the V1 model runner gets them
here from the log-probs of its sampler, and a scheduler passes them on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from alphaapollo.engines.vllm.settings import MASK_SCHEDULER

KEPT = "alphaapollo_kept"  # attribute of the V1 sampler: bool [B, V], the tokens kept in the last step


def return_kept_tokens(sample_tokens: Callable[..., Any]) -> Callable[..., object]:
    """Wrap the method of the V1 model runner that samples: with the scheduler for masks, it returns log-probs among the
    kept tokens, and the masks."""

    @functools.wraps(sample_tokens)
    def sample_and_return_masks(self: Any, *arguments: object) -> object:
        if self.vllm_config.scheduler_config.scheduler_cls != MASK_SCHEDULER:
            return sample_tokens(self, *arguments)
        from vllm.v1.outputs import SamplingMaskLists

        sampler = self.sampler.topk_topp_sampler
        setattr(sampler, KEPT, None)
        output = sample_tokens(self, *arguments)
        if (kept := getattr(sampler, KEPT)) is not None:  # None: all requests are greedy
            kept[kept.all(dim=1)] = False
            offsets = np.concatenate([[0], kept.sum(dim=1).cumsum(dim=0).numpy()])
            output.sampling_masks = SamplingMaskLists(kept.nonzero()[:, 1].int().numpy(), offsets)
        return output

    return sample_and_return_masks


def omit_complete_sets(to_lists: Callable[..., Any]) -> Callable[..., object]:
    """Wrap the function of the V2 model runner that makes lists of the sampling masks of a step: a token that could be
    any token gets an empty mask."""

    @functools.wraps(to_lists)
    def make_lists(self: Any, *arguments: object) -> object:
        counts = self.counts.where(self.counts < self.vocab_size, 0)
        return to_lists(self._replace(counts=counts), *arguments)

    return make_lists
