from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch

from alphaapollo.engines.vllm.excluded_tokens import exclude_from_logits
from alphaapollo.engines.vllm.images import (
    clear_deepstack_features,
    find_placeholder_ranges,
)
from alphaapollo.types import ImageInput

PAD = 9


def encoded_image(*token_ids: int) -> ImageInput:
    return ImageInput({}, token_ids, PAD, "digest")


def test_ranges_of_placeholders() -> None:
    """The tokens 5 are between the placeholders of the second image, e.g. a row separator."""
    images = [encoded_image(8, PAD, PAD), encoded_image(PAD, PAD, 5, PAD)]
    first, second = find_placeholder_ranges([1, 8, PAD, PAD, 2, PAD, PAD, 5, PAD, 3], images)
    assert (first.offset, first.length, first.is_embed) == (2, 2, None)
    assert (second.offset, second.length) == (5, 4)
    assert second.is_embed is not None and second.is_embed.tolist() == [True, True, False, True]


def test_placeholders_are_excluded_from_logits() -> None:
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    exclude_from_logits(model, (2,), torch.device("cpu"))
    probabilities = model.compute_logits(torch.tensor([[0.0, 0.0, 50.0]])).softmax(-1)
    assert probabilities.tolist() == [[0.5, 0.5, 0.0]]
    assert model.compute_logits(None) is None  # a tensor-parallel rank without logits


def test_deepstack_features_are_cleared() -> None:
    features = [torch.ones(2, 3), torch.ones(2, 3)]
    clear_deepstack_features(SimpleNamespace(deepstack_input_embeds=features))
    assert not any(buffer.any() for buffer in features)
    clear_deepstack_features(SimpleNamespace())  # other families
