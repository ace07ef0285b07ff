"""The log-probs and gradients of a row equal those of transformers' eager attention. They do not depend on the rows
beside it, packing, shared prompts, Ulysses or gradient checkpointing. docs/models.md has the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Data, Model, Rollout
from alphaapollo.models.load import check_weight_files, load_causal_lm, load_without_weights
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel
from alphaapollo.planning.model_requirements import ModelUse, check_models, choose_kernels
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck
from scripts.models_page import RESULTS, ROOT, render_page
from tests.architectures.engine import LIMITS
from tests.architectures.layouts import (
    CPU,
    Case,
    Result,
    assert_same,
    compute,
    compute_on_ranks,
    compute_with_transformers,
)
from tests.architectures.models import ARCHITECTURES, WINDOW, Architecture
from tests.architectures.refusals import ENGINE, find_refusals
from tests.unit.tiny import run_ranks

BY_NAME = {one.name: one for one in ARCHITECTURES}
ALONE = ((0,), (1,), (2,), (3,))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {one.name: one.save(tmp_path_factory.mktemp("model")) for one in ARCHITECTURES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Result]:
    supported = [one for one in ARCHITECTURES if "checkpointing" not in find_refusals(one)]
    return {one.name: compute_with_transformers(one, folders[one.name]) for one in supported}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_results_do_not_depend_on_the_layout(folders, expected, architecture: Architecture) -> None:
    folder, refusals = folders[architecture.name], find_refusals(architecture)
    if "checkpointing" in refusals:  # the model is refused; docs/models.md shows the reason
        return
    for attention in ("padded",) if "packed" in refusals else ("padded", "sdpa"):
        cases = [Case(folder, attention), Case(folder, attention, ALONE), Case(folder, attention, checkpointing=True)]
        if "shared prompts" not in refusals:
            cases.append(Case(folder, attention, uses_shared_prompts=True))
        for case in cases:
            assert_same(compute(case), expected[architecture.name])


def test_ulysses_gives_the_results_of_one_rank(folders, expected) -> None:
    names = [name for name in expected if "Ulysses" not in find_refusals(BY_NAME[name])]
    cases = [Case(folders[name], "sdpa" if index % 2 else "padded") for index, name in enumerate(names)]
    first, second = run_ranks(compute_on_ranks, 2, cases, timeout=350)
    for name, (logprobs, part), (_, other_part) in zip(names, first, second, strict=True):
        assert_same((logprobs, {key: part[key] + other_part[key] for key in part}), expected[name])


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_each_tensor_of_a_folder_is_trained(architecture: Architecture, tmp_path: Path) -> None:
    """Output heads that are tied, untied, or untied in a folder whose config.json ties them."""
    if "checkpointing" in find_refusals(architecture):
        return
    for name, is_tied, says_tied in (("tied", True, True), ("untied", False, False), ("own head", False, True)):
        folder = tmp_path / name
        architecture.build_model({"tie_word_embeddings": is_tied}).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": says_tied}
        (folder / "config.json").write_text(json.dumps(config))
        model = Model(path=str(folder), attention="padded")
        assert check_weight_files(model) == []
        without, loaded = load_without_weights(model), load_causal_lm(model, "padded")
        assert dict(without.named_parameters()).keys() == dict(loaded.named_parameters()).keys()
        assert ("lm_head.weight" in dict(without.named_parameters())) is not is_tied
    assert_same(compute(Case(folder)), compute_with_transformers(architecture, folder))


def save_config(name: str, folder: Path) -> str:
    BY_NAME[name].build_config().save_pretrained(folder)
    return str(folder)


def serve(path: str, max_length: int) -> ModelUse:
    lengths = Data(max_prompt_length=max_length - 1, max_response_length=1)
    return ModelUse("model.path", Model(path=path), engine=Rollout(), lengths=lengths)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_recurrent_layers_are_refused_where_rows_would_influence_each_other(tmp_path, name: str) -> None:
    path, reason = save_config(name, tmp_path), "layers of type linear_attention"
    configured = Model(path=path)
    assert choose_kernels(resolve_model(configured, "cuda"), configured).attention == "padded"
    packed = Model(path=path, attention="sdpa")
    model = rf"model\.path={path} \({name}\) .*{reason}"
    with pytest.raises(ValueError, match=rf"{model}.* model\.attention=padded"):
        choose_kernels(resolve_model(packed, "cuda"), packed)
    with pytest.raises(ValueError, match=rf"{model}.* packed"):  # a critic or reward model
        load_causal_lm(packed, "sdpa", load_without_weights(packed).dtype)
    with pytest.raises(ValueError, match=rf"parallel_size=2: {model}"):
        check_models([ModelUse("model.path", configured, ulysses_size=2)])
    policy = PolicyModel(load_without_weights(configured))
    sharing = SharedPromptCheck(policy, policy, MicroBatchBuilder(True, CPU), policy.model.dtype)
    assert reason in (sharing.unsupported_reason or "")


def test_attention_with_a_mask_of_the_model_is_refused() -> None:
    assert "DogeAttention" in find_refusals(BY_NAME["doge"])["packed"]
    assert "layers of type chunked_attention" in find_refusals(BY_NAME["llama4_text"])["packed"]


def test_dynamic_rope_needs_rows_within_the_context_length(tmp_path) -> None:
    path = save_config("llama, dynamic RoPE, rows above the context length", tmp_path)
    load_without_weights(resolve_model(Model(path=path), "cpu", 32))
    with pytest.raises(ValueError, match=r"dynamic RoPE \(llama\) .* 33 .* 32"):
        load_without_weights(resolve_model(Model(path=path), "cpu", 33))
    with pytest.raises(ValueError, match=r"33: .* context length"):
        check_models([serve(path, 33)])


@pytest.mark.parametrize("name", ["llama, longrope", "phi3, longrope, long factors"])
def test_the_memory_of_longrope_models_can_be_planned(tmp_path, name: str) -> None:
    loaded = load_without_weights(Model(path=save_config(name, tmp_path)))
    tokens = torch.zeros(1, 4, dtype=torch.long, device="meta")
    loaded.base_model(input_ids=tokens, position_ids=tokens, use_cache=False)  # on a meta device, as in the memory plan


def test_a_window_that_vllm_does_not_support_is_refused(tmp_path) -> None:
    path = save_config("qwen2_moe, sliding window in one layer", tmp_path)
    check_models([serve(path, WINDOW)])
    with pytest.raises(ValueError, match=r"17: .* sliding window.* 16 tokens"):
        check_models([serve(path, WINDOW + 1)])


def test_the_pages_have_every_architecture_and_vllm_agrees() -> None:
    page, table = (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), render_page()
    assert [
        one.family for one in ARCHITECTURES if not (f"`{one.family}`" in page and f"| `{one.family}` |" in table)
    ] == []
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))["models"]
    assert measured.keys() == {one.name for one in ARCHITECTURES if "checkpointing" not in find_refusals(one)}
    differing = {name for name, one in measured.items() if exceeds_limit(name, one)}
    refused_before_the_start = {name for name in measured if ENGINE in find_refusals(BY_NAME[name])}
    assert refused_before_the_start == {"qwen2_moe, sliding window in one layer"}
    assert differing == {*refused_before_the_start, "deepseek_v3"}  # the first weight sync finds the other one


def exceeds_limit(name: str, result: float | str) -> bool:
    return isinstance(result, float) and result > LIMITS[BY_NAME[name].dtype]
