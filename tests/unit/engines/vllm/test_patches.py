"""Patch of vLLM's sampler on GPUs, applied to a stub. tests/loop/test_engine*.py test the patches on CPUs."""

import pytest
import torch

from alphaapollo.engines.vllm.patches import return_untruncated_logits


@pytest.mark.parametrize("flags", [(False,), (False, False)], ids=["0.32", "0.33"])
def test_logits_are_taken_before_truncation(flags):
    def sample_random(self, logits, mapping, mapping_np, pos, top_k, top_p, *received):
        assert received == flags
        logits[:, 1:] = -torch.inf
        return logits.argmax(-1), logits

    logits = torch.tensor([[1.0, 0.0]])
    patched = return_untruncated_logits(sample_random)
    assert torch.equal(patched(None, logits.clone(), None, None, None, torch.tensor([1]), None, *flags)[1], logits)
    assert patched(None, logits.clone(), None, None, None, None, None, *flags)[1][0, 1] == -torch.inf
