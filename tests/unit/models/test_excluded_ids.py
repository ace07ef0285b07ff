"""Models with more embeddings than the tokenizer has tokens: ids without a token are never sampled or trained."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from alphaapollo.config.schema import Model, Rollout
from alphaapollo.data.vocabulary import find_excluded_ids
from alphaapollo.engines.hf import HFEngine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder, make_rows
from alphaapollo.models.policy import PolicyModel, check_forward_vs_hf
from alphaapollo.types import Sampling
from tests.unit.tiny import VOCABULARY, build_model

KNOWN = 20  # tokens, of VOCABULARY embeddings
HOLE = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose rows without a token are by far the most probable."""
    folders = {}
    for name in ("qwen3", "gemma2", "llama"):
        model, folder = build_model(name), tmp_path_factory.mktemp(name)
        head = model.get_output_embeddings().weight.data
        head[KNOWN:], head[HOLE] = 20 * head[KNOWN:], 20 * head[HOLE]
        model.save_pretrained(folder)
        words = {f"w{index}": index for index in range(KNOWN) if index != HOLE}
        tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(folder)
        folders[name] = folder
    return folders


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama"])
def test_engine_and_trainer_exclude_ids_without_a_token(folders: dict[str, Path], name: str) -> None:
    model = Model(path=str(folders[name]))
    excluded = find_excluded_ids(model.path, "", False)
    assert excluded == (HOLE, *range(KNOWN, VOCABULARY))
    spec = EngineSpec(
        *(0, model.path, False, Rollout(name="hf", max_num_seqs=256), "cpu", "float32", 64, "log"),
        tokenizer_path=model.path,
    )

    async def sample() -> tuple[list[int], list[float]]:
        engine = HFEngine(spec)
        await engine.start()
        answers = [await engine.generate([2, 3, 4], Sampling(16, seed=seed), str(seed)) for seed in range(4)]
        text = [2, 3, 4, *(token for answer in answers for token in answer.token_ids[:8])]
        return text, await engine.log_probs(text)

    text, expected = asyncio.run(sample())
    assert not {*text} & {*excluded}
    policy = PolicyModel(load_causal_lm(model, "padded"), excluded)
    assert policy.num_tokens == KNOWN
    builder = MicroBatchBuilder(True, torch.device("cpu"))
    found = policy(builder.build(make_rows([np.array(text)], [1]), [0]), 1.0).logprobs
    if name != "gemma2":  # transformers' default attention, which the engine uses, does not cap its scores
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)
    assert check_forward_vs_hf(policy, builder, torch.float32) < 1e-4
    found.sum().backward()
    if name == "llama":  # the other heads are tied
        gradient = policy.model.get_output_embeddings().weight.grad
        assert gradient[:HOLE].any() and not gradient[list(excluded)].any()
