from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import BatchLayout
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import FrozenFsdp, Model
from alphaapollo.models import sharding
from alphaapollo.models.load import load_reward_model
from alphaapollo.types import Row
from alphaapollo.workers.critic import RewardModelWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.unit.tiny import run_ranks, save_scorer, some_rows
from tests.unit.workers.training import call_for_each

TEXTS = [row.token_ids for row in some_rows(9)]


@pytest.fixture(scope="session")
def scorer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of tiny reward models as transformers saves them."""
    made: dict[tuple[str, str], Path] = {}

    def folder(name: str, kind: str = "SequenceClassification") -> Path:
        if (name, kind) not in made:
            made[name, kind] = save_scorer(name, tmp_path_factory.mktemp(name), kind)
        return made[name, kind]

    return folder


def one_batch(num_ranks: int, max_tokens: int, padded: bool) -> BatchLayout:
    rows = [Row(ids, [0] * (len(ids) - 1) + [1], [0.0] * len(ids), [len(ids) - 1]) for ids in TEXTS]
    return build_batch_layout(rows, list(range(len(rows))), num_ranks, len(rows), max_tokens, padded, 0, False)


def scores(rank: int, num_ranks: int, address: str, layout: tuple[str, int, int], folder: str) -> np.ndarray:
    """Scores in a layout: attention, tokens of a micro-batch, ranks that share every sequence."""
    sharding.MIN_UNIT = 0
    attention, max_tokens, shared = layout
    model = resolve_model(Model(path=folder, attention=attention), "cpu")
    worker = RewardModelWorker(model, FrozenFsdp(), RankPlacement(rank, num_ranks, address, "cpu", 1, shared))
    batch = one_batch(num_ranks // shared, max_tokens, worker.builder.padded)
    found = worker.compute_scores(batch.rank_batches[rank // shared])
    worker.close()
    return found


def by_transformers(folder: Path) -> np.ndarray:
    """Scores of single texts by the saved model."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    is_token = json.loads((folder / "config.json").read_text())["architectures"][0].endswith("ForTokenClassification")
    auto = AutoModelForTokenClassification if is_token else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return np.array([model(torch.tensor([ids])).logits.flatten()[-1].item() for ids in TEXTS])


@pytest.mark.parametrize(
    ("name", "kind", "attention", "max_tokens"),
    [
        ("qwen3", "SequenceClassification", "padded", 1),
        ("qwen3", "SequenceClassification", "sdpa", 10_000),
        ("llama", "SequenceClassification", "sdpa", 40),
        ("gemma2", "SequenceClassification", "padded", 40),
        ("qwen3", "TokenClassification", "padded", 40),  # with a bias
    ],
)
def test_scores_are_those_of_transformers(scorer_folder, name: str, kind: str, attention: str, max_tokens: int) -> None:
    folder = scorer_folder(name, kind)
    column = scores(0, 1, "", (attention, max_tokens, 1), str(folder))
    expected = by_transformers(folder)
    assert expected.std() > 0.01  # they tell the texts apart
    ours = one_batch(1, max_tokens, attention == "padded").join_columns([column])
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_two_ranks_give_the_same_scores(scorer_folder) -> None:
    """Nine texts in micro-batches of at most 100 tokens; one rank sometimes computes a dummy. Then with sequence
    parallelism, padded and packed."""
    folder, layouts = scorer_folder("qwen3"), [("padded", 100, 1), ("padded", 100, 2), ("sdpa", 100, 2)]
    expected, ranks = by_transformers(folder), run_ranks(call_for_each, 2, scores, layouts, str(folder))
    np.testing.assert_allclose(one_batch(2, 100, True).join_columns([rank[0] for rank in ranks]), expected, atol=1e-5)
    for rank in ranks:
        for padded, column in zip((True, False), rank[1:], strict=True):
            np.testing.assert_allclose(one_batch(1, 100, padded).join_columns([column]), expected, atol=1e-5)


def test_other_models_are_errors(model_folder, tmp_path: Path) -> None:
    """A language model, a classifier with several classes, an encoder, and a scorer without its head."""
    from safetensors.torch import load_file, save_file
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    headless = save_scorer("qwen3", tmp_path / "headless")
    tensors = load_file(headless / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, headless / "model.safetensors", metadata={"format": "pt"})
    for folder, fact in (
        (model_folder("qwen3"), "Qwen3ForCausalLM with num_labels=2"),
        (save_scorer("qwen3", tmp_path / "classes", num_labels=3), "num_labels=3"),
        (tmp_path / "bert", "linear head named `score`"),
        (headless, r"1 in total.* score\.weight"),
    ):
        with pytest.raises(ValueError, match=f"{folder}.*{fact}"):
            load_reward_model(Model(path=str(folder)), "padded")
