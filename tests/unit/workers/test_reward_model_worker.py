from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models.load import load_reward_model
from alphaapollo.types import Row
from tests.unit.tiny import save_scorer
from tests.unit.workers.layouts import compute
from tests.unit.workers.training import Case, make_batch, make_rows


def by_transformers(folder: str, rows: Sequence[Row]) -> np.ndarray:
    """Scores of single texts by the saved model."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    is_token = json.loads(Path(folder, "config.json").read_text())["architectures"][0].endswith(
        "ForTokenClassification"
    )
    auto = AutoModelForTokenClassification if is_token else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return np.array([model(torch.tensor([row.token_ids])).logits.flatten()[-1].item() for row in rows])


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
    case = Case(str(scorer_folder(name, kind)), role="reward_model", attention=attention, max_tokens=max_tokens)
    (found,) = compute(0, 1, "", [case])
    expected = by_transformers(case.folder, make_rows(case))
    assert expected.std() > 0.01  # they tell the texts apart
    ours = make_batch(case).join_columns([found.columns["scores"]])
    np.testing.assert_allclose(ours, expected, atol=1e-5)


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
