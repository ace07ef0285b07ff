from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from alphaapollo.batching.batch import Rows
from alphaapollo.config.schema import Model
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.moe_routing import ROUTED_EXPERTS, ExpertSizes, RouterHooks
from alphaapollo.models.policy import PolicyModel, check_forward_vs_hf
from tests.unit.tiny import build_model, some_rows

CPU = torch.device("cpu")


def test_routers_are_those_whose_outputs_transformers_records():
    routers = RouterHooks.wrap_routers(build_model("qwen3_moe"))
    assert routers is not None and routers.sizes == ExpertSizes(4, 2) and routers.layers == [0, 1]
    assert RouterHooks.wrap_routers(build_model("qwen3")) is None


def some_experts(rows: Rows, seed: int = 0, dtype: type = np.uint8) -> np.ndarray:
    """Two of four experts for each token and each of two layers."""
    generator = np.random.default_rng(seed)
    return generator.random((len(rows.token_ids), 2, 4)).argsort(-1)[..., :2].astype(dtype)


def hand_made(model: torch.nn.Module, token_ids: list[int], experts: np.ndarray) -> torch.Tensor:
    """Log-probs of a plain model with routers forced by hooks. [T - 1]"""

    def force(layer: int):
        def hook(router, _, output):
            wanted = torch.from_numpy(experts[:, layer].astype(np.int64))
            weights = output[0].float().softmax(-1).gather(-1, wanted)
            return output[0], weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, wanted

        return hook

    hooks = [one.mlp.gate.register_forward_hook(force(layer)) for layer, one in enumerate(model.model.layers)]
    logits = model(torch.tensor([token_ids])).logits[0, :-1]
    for hook in hooks:
        hook.remove()
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_forced_experts_are_used(model_folder, padded: bool, norm: bool):
    """Weights are the router's own over the forced experts, with and without normalization; other rows and padding
    are not affected; the gradient reaches the router."""
    path = str(model_folder("qwen3_moe"))
    policy = PolicyModel(load_causal_lm(Model(path=path), "padded" if padded else "sdpa"))
    plain = build_model("qwen3_moe")
    for router in (one for model in (policy.model, plain) for one in model.modules() if hasattr(one, "norm_topk_prob")):
        router.norm_topk_prob = norm
    rows = Rows.from_rows(some_rows(3))
    forced = replace(rows, columns={ROUTED_EXPERTS: some_experts(rows, dtype=np.uint8 if padded else np.uint16)})
    stats = policy(MicroBatchBuilder(padded, CPU).build(forced, [2, 0, 1]), 1.0)
    spans = [slice(*rows.token_offsets[row : row + 2]) for row in (2, 0, 1)]
    every = [hand_made(plain, rows.token_ids[span].tolist(), forced.columns[ROUTED_EXPERTS][span]) for span in spans]
    expected = [one[rows.response_starts[row] - 1 :] for one, row in zip(every, (2, 0, 1), strict=True)]
    torch.testing.assert_close(stats.logprobs, torch.cat(expected), rtol=1e-4, atol=1e-5)
    stats.logprobs.sum().backward()
    assert policy.model.model.layers[0].mlp.gate.weight.grad.abs().max() > 1e-3
    routing = policy.routers.current
    assert routing.counts.sum() == 2 * 2 * rows.lengths.sum()
    assert 0.1 < routing.num_overridden / routing.counts.sum() < 0.9
    own = policy(MicroBatchBuilder(padded, CPU).build(rows, [2, 0, 1]), 1.0)
    assert (own.logprobs - stats.logprobs).abs().max() > 1e-2 and policy.routers.current.num_overridden == 0
    assert check_forward_vs_hf(policy, MicroBatchBuilder(padded, CPU), torch.float32) < 1e-5


def test_the_dummy_does_not_count_and_experts_of_another_shape_are_refused(model_folder):
    policy = PolicyModel(load_causal_lm(Model(path=str(model_folder("qwen3_moe"))), "padded"))
    rows = Rows.from_rows(some_rows(3))
    policy(MicroBatchBuilder(True, CPU).build(replace(rows, columns={ROUTED_EXPERTS: some_experts(rows)}), []), 1.0)
    assert policy.routers.current.counts.sum() == 0 == policy.routers.current.num_overridden
    other = replace(rows, columns={ROUTED_EXPERTS: np.zeros((len(rows.token_ids), 3, 2), np.uint8)})
    with pytest.raises(ValueError, match=r"3 layers x 2 experts.* 2 x 2"):
        policy(MicroBatchBuilder(True, CPU).build(other, [0]), 1.0)


SHAPE = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0}
SHAPE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def small(name: str, **more: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE | more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("name", "more", "layers"),
    [
        ("Mixtral", {"num_local_experts": 4}, [0, 1]),
        ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 24}, [0, 1]),
        ("Olmoe", {"num_experts": 4}, [0, 1]),
        ("GptOss", {"num_local_experts": 4}, [0, 1]),
        ("DeepseekV3", GROUPED | LATENT, [1]),  # sigmoids, groups, a first layer without experts
        ("Glm4Moe", GROUPED, [1]),
    ],
)
def test_routers_of_other_models_use_forced_experts(name: str, more: dict[str, object], layers: list[int]):
    model = small(name, **more)
    routers = RouterHooks.wrap_routers(model)
    assert routers is not None and routers.layers == layers
    forced = torch.stack([torch.randperm(4)[:2] for _ in range(14)]).view(7, 2, 2)
    routing = routers.start_recording(torch.ones(7, dtype=torch.bool), {ROUTED_EXPERTS: forced})
    model(torch.arange(2, 9)[None], use_cache=False)
    for layer in layers:
        assert routing.counts[layer].tolist() == forced[:, layer].flatten().bincount(minlength=4).tolist()
    assert routing.counts.sum() == 14 * len(layers) and routing.num_overridden > 0


def test_experts_follow_the_engine_again_after_an_error_without_adapters():
    policy = PolicyModel(build_model("qwen3_moe"))
    with pytest.raises(RuntimeError), policy.disable_adapters():
        assert not policy.routers.follows_engine
        raise RuntimeError("out of memory")
    assert policy.routers.follows_engine
