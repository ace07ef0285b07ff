"""Complete runs with a trained reward model: the scores in the rollout log equal those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.quickstart.make_task import make_tokenizer
from tests.loop.conftest import FinishedRun, Runner


def make_scorer(folder: Path) -> Path:
    """A reward model for the quickstart's tokenizer with random weights that give texts different scores."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    model = Qwen3ForSequenceClassification(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def expected_scores(folder: Path, texts: list[list[int]]) -> np.ndarray:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.array([model(torch.tensor([ids])).logits.item() for ids in texts])


def records_of(done: FinishedRun, name: str) -> list[dict[str, Any]]:
    lines = (done.folder / "rollouts" / f"{name}.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def component(records: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([record["components"][name] for record in records])


def test_reward_model_score_is_added_to_the_function(
    ppo: Runner, tmp_path: Path, leaves_nothing: Callable[[], None]
) -> None:
    """Two ranks, and vLLM on two more. Dynamic sampling uses the reward that includes the model's score."""
    from transformers import AutoTokenizer

    scorer = make_scorer(tmp_path / "scorer")
    done = ppo.run(
        "reward_model.enable=True",
        f"reward_model.model.path={scorer}",
        "reward_model.weight=0.5",
        "reward_model.forward_max_token_len_per_gpu=200",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward_model",
        "trainer.n_gpus_per_node=2",
        "trainer.controller=local",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.save_freq=-1",
    )
    leaves_nothing()
    line_break = AutoTokenizer.from_pretrained(scorer).encode("\n", add_special_tokens=False)
    for name in ("step_000001", "step_000002", "val_000002"):
        records = records_of(done, name)
        ended = [record["stop_reason"] == "stop" for record in records]
        texts = [record["rows"][0]["ids"] + line_break * end for record, end in zip(records, ended, strict=True)]
        scores = component(records, "reward_model")
        np.testing.assert_allclose(scores, expected_scores(scorer, texts), atol=1e-5)
        assert scores.std() > 0.01
        function = np.array([sum(letter.isdigit() for letter in record["text"]) / 10 for record in records])
        np.testing.assert_allclose(component(records, "task"), function)
        np.testing.assert_allclose([record["reward"] for record in records], function + 0.5 * scores)
    last, training, validation = done.metrics[-1], records_of(done, "step_000002"), records_of(done, "val_000002")
    assert last["critic/score/mean"] == pytest.approx(np.mean([record["reward"] for record in training]))
    assert last["reward/component/reward_model"] == pytest.approx(component(training, "reward_model").mean())
    assert last["val/reward"] == pytest.approx(np.mean([record["reward"] for record in validation]))
    assert last["val/accuracy"] == pytest.approx(component(validation, "accuracy").mean())
    assert last["reward_model/truncated"] == 0 and last["memory/reward_model_rss_gib"] > 0.1
    assert last["timing/reward_model"] > 0 and last["actor/grad_norm"] > 0 and last["sync/probe_gap"] < 5e-5
