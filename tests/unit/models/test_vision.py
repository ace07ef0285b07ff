"""Vision-language models compared with plain transformers: log-probs, gradients, positions and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen

from alphaapollo.batching.batch import Rows
from alphaapollo.batching.shared_prompts import SharedPrompts
from alphaapollo.config.schema import Model
from alphaapollo.data.images import EXCLUDED_LOGIT, reads_images
from alphaapollo.models import micro_batch, vision_attention
from alphaapollo.models.decoder import find_vision_blocks, load_example_image
from alphaapollo.models.image_batch import compute_mrope_positions
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.lora import load_trainable_lm, resolve_target_modules
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel, check_policy
from alphaapollo.types import Row
from tests.vision.models import FAMILIES, VARIANTS
from tests.vision.rows import (
    compute_plain_logprobs,
    load_plain,
    make_plain_arguments,
    make_row,
    make_rows_with_images,
    prepare_encoded_images,
)

CPU = torch.device("cpu")
QWEN = ["qwen3_vl", "qwen2_5_vl", *VARIANTS]


def load(folder: Path, attention: Any = "padded", **settings: Any) -> PolicyModel:
    return PolicyModel(load_causal_lm(Model(path=str(folder), **settings), attention))


def build(rows: list[Row], attention: str = "padded", prefixes: SharedPrompts | None = None) -> MicroBatch:
    return MicroBatchBuilder(attention == "padded", CPU).build(Rows.from_rows(rows, prefixes), range(len(rows)))


def select_actions(rows: list[Row], values: torch.Tensor) -> torch.Tensor:
    mask = [flag for row in rows for flag in row.action_mask[row.response_start :]]
    return values[torch.tensor(mask).bool()]


@pytest.mark.parametrize("attention", ["padded", "sdpa"])
@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_logprobs_and_gradients_equal_transformers(vision_folder, family: str, attention: str):
    """Rows with 0 to 3 images beside each other. The tower is trained."""
    folder = vision_folder(family)
    rows, plain = make_rows_with_images(folder), load_plain(folder)
    expected = select_actions(rows, torch.cat([compute_plain_logprobs(plain, row, 0.8) for row in rows]))
    weights = torch.linspace(-1, 1, len(expected))
    (weights * expected).sum().backward()

    policy = load(folder, attention, enable_gradient_checkpointing=True)
    logprobs = select_actions(rows, policy(build(rows, attention), 0.8).logprobs)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    (weights * logprobs).sum().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
    assert all(parameter.grad.any() for part in find_vision_blocks(policy.model) for parameter in part.parameters())


def attend_each_sequence(
    query: Any, key: Any, value: Any, bounds: Any, _: Any, longest: int, __: int, scale: float
) -> Any:
    """What torch's kernel for packed sequences computes without a window: [T, heads, d] each -> [T, heads, d]"""
    lengths = bounds.diff().tolist()
    assert longest == max(lengths)
    parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    heads_first = ([tensor.transpose(0, 1) for tensor in part] for part in parts)
    outputs = [torch.nn.functional.scaled_dot_product_attention(*part, scale=scale) for part in heads_first]
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_one_call_per_layer_of_the_tower_gives_the_same_features(vision_folder, family: str, monkeypatch: Any):
    kernel = mock.Mock(side_effect=attend_each_sequence)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    monkeypatch.setattr(vision_attention, "activate_flash_attention_3", lambda: False)
    plain, packed = load(vision_folder(family)), load(vision_folder(family))
    vision_attention.use_varlen_attention_in_vision_tower(packed.model)
    micro = build(make_rows_with_images(vision_folder(family)))
    with torch.no_grad():
        torch.testing.assert_close(packed(micro, 1.0).logprobs, plain(micro, 1.0).logprobs, rtol=0, atol=1e-5)
    images_have_one_size = family == "internvl"  # so they are one batch
    assert kernel.call_count == (0 if images_have_one_size else len(find_vision_blocks(packed.model)))


@pytest.mark.parametrize("family", QWEN)
def test_positions_equal_get_rope_index(vision_folder, family: str):
    folder = vision_folder(family)
    rows, plain = make_rows_with_images(folder), load_plain(folder)
    positions = compute_mrope_positions(Rows.from_rows(rows))
    assert positions is not None
    ends = np.cumsum([len(row.token_ids) for row in rows])
    for row, found in zip(rows, np.split(positions, ends[:-1], 1), strict=True):
        if row.images:
            arguments = make_plain_arguments(plain, row)
            del arguments["pixel_values"]
            torch.testing.assert_close(torch.from_numpy(found), plain.model.get_rope_index(**arguments)[0][:, 0])
        else:
            assert (found == np.arange(len(row.token_ids))).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholders_have_no_probability(vision_folder, family: str):
    folder = vision_folder(family)
    rows, policy = make_rows_with_images(folder), load(folder)
    with torch.no_grad():
        hidden = policy.compute_lm_head_input(build(rows))
        plain = hidden.states @ hidden.head.weight.T
        logp = plain.index_fill(1, hidden.head.excluded, EXCLUDED_LOGIT).log_softmax(-1)
        stats = policy(build(rows), 1.0, needs_entropy=True)
        tokens = torch.tensor([[5, 6, 7]])
        with policy.generation_mode():
            logits, _ = policy.next_logits(tokens, torch.ones_like(tokens), torch.arange(3)[None], None)
    others = [token for token in range(logp.shape[1]) if token not in policy.placeholder_ids]
    assert len(others) < logp.shape[1]
    torch.testing.assert_close(logp[:, others].exp().sum(-1), torch.ones(len(logp)))
    assert (logp.exp()[:, list(policy.placeholder_ids)] == 0).all()
    torch.testing.assert_close(stats.entropy, -(logp[:, others].exp() * logp[:, others]).sum(-1), rtol=1e-4, atol=1e-5)
    assert (logits[0].softmax(-1)[list(policy.placeholder_ids)] == 0).all()
    assert "placeholder_bias" not in policy.state_dict()


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_self_check_compares_a_row_with_an_image(vision_folder, family: str, monkeypatch: pytest.MonkeyPatch):
    model = Model(path=str(vision_folder(family)))
    policy = PolicyModel(load_causal_lm(model, "sdpa"))
    policy.example_image = load_example_image(model)
    for parameter in policy.parameters():  # so that log-probs depend on positions
        parameter.data.mul_(4 if parameter.ndim == 2 else 1)
    assert check_policy(policy, MicroBatchBuilder(False, CPU), torch.float32) == []
    monkeypatch.setattr(micro_batch, "compute_mrope_positions", lambda rows: None)
    if family in QWEN:
        with pytest.raises(ValueError, match="differ from those of transformers"):
            check_policy(policy, MicroBatchBuilder(False, CPU), torch.float32)


def test_adapters_are_only_in_the_language_model(vision_folder):
    """q_proj is a name of layers of InternVL's tower and of its language model."""
    model = Model(path=str(vision_folder("internvl")), lora_rank=2)
    adapted = [name for name, _ in load_trainable_lm(model, "padded", None, 0).named_parameters() if ".lora_A." in name]
    assert len(adapted) == 2 * 7 and all(name.startswith("model.language_model.layers.") for name in adapted)
    plain = load_causal_lm(model, "padded")
    assert "fc1" not in resolve_target_modules(plain, model)
    with pytest.raises(ValueError, match=r"'fc1' .*down_proj, "):
        resolve_target_modules(plain, Model(lora_rank=2, target_modules=["fc1"]))


def test_text_models_refuse_images(vision_folder, model_folder):
    micro = build([make_row(prepare_encoded_images(vision_folder("internvl")))])
    with pytest.raises(ValueError, match="images, but Qwen3Model "):
        load(model_folder("qwen3"))(micro, 1.0)


def test_models_with_bidirectional_image_tokens_are_used_like_text_models():
    from transformers import Gemma3Config, Qwen3Config, Qwen3VLConfig

    assert not reads_images(Gemma3Config()) and not reads_images(Qwen3Config()) and reads_images(Qwen3VLConfig())
