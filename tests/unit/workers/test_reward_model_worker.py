from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import FrozenFsdp, Model
from alphaapollo.data.batch import TrainBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.models import sharding
from alphaapollo.models.load import load_reward_model
from alphaapollo.types import Row
from alphaapollo.workers.process_group import RankPlacement
from alphaapollo.workers.reward_model import RewardModelWorker
from tests.unit.tiny import free_address, run_ranks, save_scorer, some_rows

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


def one_batch(num_ranks: int, max_tokens: int, padded: bool) -> TrainBatch:
    rows = [Row(ids, [0] * (len(ids) - 1) + [1], [0.0] * len(ids), [len(ids) - 1]) for ids in TEXTS]
    return build_train_batch(rows, list(range(len(rows))), num_ranks, len(rows), max_tokens, padded, 0, False)


def scores(
    rank: int,
    num_ranks: int,
    address: str,
    folder: str,
    attention: str = "padded",
    max_tokens: int = 40,
    shared: int = 1,
) -> np.ndarray:
    sharding.MIN_UNIT = 0
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
    ("name", "attention", "max_tokens"),
    [
        ("qwen3", "padded", 1),
        ("qwen3", "padded", 10_000),
        ("qwen3", "sdpa", 10_000),
        ("llama", "sdpa", 40),
        ("gemma2", "padded", 40),
    ],
)
def test_scores_are_those_of_transformers(scorer_folder, name: str, attention: str, max_tokens: int) -> None:
    folder = scorer_folder(name)
    ours = one_batch(1, max_tokens, attention == "padded").join_columns(
        [scores(0, 1, free_address(), str(folder), attention, max_tokens)]
    )
    expected = by_transformers(folder)
    assert expected.std() > 0.01  # they tell the texts apart
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_last_token_score_is_used(scorer_folder) -> None:
    folder = scorer_folder("qwen3", "TokenClassification")  # with a bias
    ours = one_batch(1, 40, True).join_columns([scores(0, 1, free_address(), str(folder))])
    np.testing.assert_allclose(ours, by_transformers(folder), atol=1e-5)


@pytest.mark.timeout(120)
def test_two_ranks_give_the_same_scores(scorer_folder) -> None:
    """Nine texts in micro-batches of at most 100 tokens; one rank sometimes computes a dummy."""
    folder = scorer_folder("qwen3")
    columns = run_ranks(scores, 2, str(folder), "padded", 100)
    ours = one_batch(2, 100, True).join_columns(columns)
    np.testing.assert_allclose(ours, by_transformers(folder), atol=1e-5)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("attention", ["padded", "sdpa"])
def test_sequence_parallel_ranks_give_the_same_scores(scorer_folder, attention: str) -> None:
    folder = scorer_folder("qwen3")
    for scored in run_ranks(scores, 2, str(folder), attention, 100, 2, timeout=150):
        ours = one_batch(1, 100, attention == "padded").join_columns([scored])
        np.testing.assert_allclose(ours, by_transformers(folder), atol=1e-5)


def load(path: Path) -> None:
    load_reward_model(Model(path=str(path)), "padded")


def test_a_language_model_is_not_a_reward_model(model_folder) -> None:
    with pytest.raises(
        ValueError, match="is a Qwen3ForCausalLM with num_labels=2, not a reward model with a trained head"
    ):
        load(model_folder("qwen3"))


def test_a_classifier_with_several_classes_is_not_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_labels=3, not a reward model"):
        load(save_scorer("qwen3", tmp_path, num_labels=3))


def test_a_missing_head_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_scorer("qwen3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights are missing \(1 in total\), e.g. score.weight"):
        load(folder)


def test_an_encoder_is_an_error(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no linear head named `score` on a decoder"):
        load(tmp_path)
