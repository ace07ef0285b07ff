"""Log-probs compared with the plain Hugging Face forward pass, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import Rows
from alphaapollo.config.schema import Model
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder, make_rows
from alphaapollo.models.policy import PolicyModel, check_forward_vs_hf, check_policy
from tests.unit.tiny import build_model

CPU = torch.device("cpu")
LENGTHS, STARTS = [9, 12, 5], [3, 1, 4]


def some_rows() -> Rows:
    ids = np.random.default_rng(5).integers(2, 48, sum(LENGTHS))
    return make_rows(np.split(ids, np.cumsum(LENGTHS)[:-1]), STARTS)


def load(folder: object, attention: Any = "padded", **settings: Any) -> PolicyModel:
    return PolicyModel(load_causal_lm(Model(path=str(folder), **settings), attention))


def test_no_mask_is_built_for_packed_rows(model_folder, monkeypatch: pytest.MonkeyPatch):
    policy, seen = load(model_folder("qwen3"), "sdpa"), []
    layer = policy.model.model.layers[0].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda **given: (seen.append(given["attention_mask"]), forward(**given))[1])
    policy(MicroBatchBuilder(False, CPU).build(some_rows(), [0, 1, 2]), 1.0)
    assert seen == [None]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_recomputes_each_layer_once(model_folder, checkpointing: bool):
    policy, calls = load(model_folder("qwen3"), enable_gradient_checkpointing=checkpointing), []
    policy.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    policy(MicroBatchBuilder(True, CPU).build(some_rows(), [0, 1, 2]), 1.0).logprobs.sum().backward()
    assert len(calls) == 1 + checkpointing


def ignore_scale(policy: PolicyModel) -> None:
    policy.scale = 1.0  # as if the key were unknown


def damage_weights(policy: PolicyModel) -> None:
    next(policy.model.model.layers[0].parameters()).data.fill_(float("nan"))


@pytest.mark.parametrize(
    ("name", "damage", "padded", "fact"),
    [
        ("granite", ignore_scale, True, r"^GraniteForCausalLM: .* model\.attention=padded"),
        ("qwen3", damage_weights, True, "log-probs are not finite"),
        ("qwen3", id, False, "beside another sequence"),  # plain causal attention over packed rows
    ],
)
def test_self_check_detects_a_problem(model_folder, name: str, damage: Any, padded: bool, fact: str):
    policy = load(model_folder(name))
    damage(policy)
    with pytest.raises(ValueError, match=fact):
        check_forward_vs_hf(policy, MicroBatchBuilder(padded, CPU), torch.float32)


def test_in_bfloat16_a_difference_is_a_warning_and_a_huge_one_an_error(model_folder, monkeypatch: pytest.MonkeyPatch):
    policy = load(model_folder("qwen3"))
    own, builder = policy.compute_logprobs_with_hf_attention, MicroBatchBuilder(True, CPU)
    for difference, dtype, found in (
        (0.3, torch.bfloat16, "0.3 nats"),
        (0.05, torch.bfloat16, ""),
        (0.05, torch.float32, ValueError),
        (1.1, torch.bfloat16, ValueError),
    ):
        other = lambda ids, tensors, difference=difference: own(ids, tensors) + difference  # noqa: E731
        monkeypatch.setattr(policy, "compute_logprobs_with_hf_attention", other)
        if found is ValueError:
            with pytest.raises(ValueError, match="differ"):
                check_forward_vs_hf(policy, builder, dtype)
        else:
            warnings = check_policy(policy, builder, dtype)
            assert len(warnings) == bool(found) and found in "".join(warnings)


def test_a_compiled_layer_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With dynamo and autograd, but without inductor's kernels. Rows of any number and length share one graph, which is
    split at attention."""
    build_model("qwen3", num_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr("alphaapollo.models.load.COMPILER", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for compiled in (False, True):
        policy = load(tmp_path, "sdpa", enable_gradient_checkpointing=True, use_torch_compile=compiled)
        for positions in ([0, 1, 2], [0, 2]):
            logprobs = policy(MicroBatchBuilder(False, CPU).build(some_rows(), positions), 0.8).logprobs
            (torch.linspace(-1, 1, len(logprobs)) * logprobs).sum().backward()
        found.append([logprobs.detach(), *(parameter.grad for parameter in policy.parameters())])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs < 10
    for ours, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
