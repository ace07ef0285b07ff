"""Patches applied to stubs of vLLM; tests/loop/test_engine*.py run the real ones."""

import torch

from alphaapollo.engines.vllm.patches import pad_single_row, return_untruncated_logits, return_untruncated_logprobs
from alphaapollo.weight_sync.vllm_digest import find_tied_layers


def test_single_row_is_computed_as_two():
    rows = []

    def linear(x, weight, bias):
        rows.append(x.shape[0])
        return torch.nn.functional.linear(x, weight, bias)

    weight, x = torch.randn(4, 3), torch.randn(5, 3)
    patched = pad_single_row(linear)
    torch.testing.assert_close(patched(x[:1], weight, None), x[:1] @ weight.t())
    torch.testing.assert_close(patched(x, weight, None), x @ weight.t())
    assert patched(x[0], weight, None).shape == (4,)
    assert rows == [2, 5, 3]


def sampler(self, logits, generators, k, p):
    logits[:, 1:] = -torch.inf  # as top-k would, in place
    return logits.argmax(-1), logits.log_softmax(-1)


def test_logprobs_are_taken_before_truncation():
    logits = torch.tensor([[1.0, 0.0]])
    expected = logits.log_softmax(-1)
    sampled, logprobs = return_untruncated_logprobs(sampler)(None, logits.clone(), {}, torch.tensor([1]), None)
    assert sampled.item() == 0 and torch.equal(logprobs, expected)
    _, untouched = return_untruncated_logprobs(sampler)(None, logits.clone(), {}, None, None)
    assert untouched[0, 0] == 0.0  # unchanged


def test_logits_are_taken_before_truncation():
    def sample_random(self, logits, mapping, mapping_np, pos, top_k, top_p, fused):
        logits[:, 1:] = -torch.inf
        return logits.argmax(-1), logits

    logits = torch.tensor([[1.0, 0.0]])
    patched = return_untruncated_logits(sample_random)
    assert torch.equal(patched(None, logits.clone(), None, None, None, torch.tensor([1]), None, False)[1], logits)
    assert patched(None, logits.clone(), None, None, None, None, None, False)[1][0, 1] == -torch.inf


def test_tied_layers():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "body": torch.nn.Linear(3, 3)})
    assert find_tied_layers(model) == []
    model["head"] = torch.nn.Linear(3, 4, bias=False)
    model["head"].weight = model["embed"].weight
    assert find_tied_layers(model) == [model["embed"], model["head"]]
