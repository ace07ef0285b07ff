from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from alphaapollo.config.schema import Config
from alphaapollo.runs.model_card import format_model_card, read_last_metrics
from tests.builders import write_rows


def saved(**more: object) -> dict[str, object]:
    role = {"model": {"path": "Qwen/Qwen3-0.6B"}, "actor": {"optim": {"lr": 3e-6}}}
    values = Config(
        actor_rollout_ref=role,
        data={"train_files": ["/home/alice/secret project/gsm8k/train.parquet"]},
        algorithm={"adv_estimator": "grpo"},
        env={"rollout": {"n": 8}},
    ).model_dump(mode="json")
    return values | more


def test_it_describes_the_model(tmp_path: Path) -> None:
    run = tmp_path / "first"
    lines = [
        {"step": 1, "val/accuracy": 0.25, "critic/score/mean": 0.1, "timing/step": 3.0},
        {"step": 2, "critic/score/mean": 0.5, "val/accuracy": None},
        {"step": 3, "critic/score/mean": 0.9},
    ]
    write_rows(run / "metrics.jsonl", lines)
    card = format_model_card(saved(), run, 2, "policy", "Qwen/Qwen3-0.6B", "Proved.")
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "tags": ["alphaapollo", "reinforcement-learning"],
        "base_model": "Qwen/Qwen3-0.6B",
    }
    adapter = format_model_card(saved(), run, 2, "policy", "Qwen/Qwen3-0.6B", "Proved.", is_adapter=True)
    assert "library_name: peft" in adapter and "The LoRA adapter of the policy of a run" in adapter
    facts = [
        *("# first\n", "after iteration 2", "| torch | 2.", "Proved."),
        *("| `env.rollout.n` | `8` |", "| `actor_rollout_ref.actor.optim.lr` | `3e-06` |"),
        *("| `val/accuracy` (iteration 1) | 0.25 |", "| `critic/score/mean` (iteration 2) | 0.5 |"),
    ]
    assert [fact for fact in facts if fact not in text] == []
    assert "timing/step" not in text and "trainer.seed" not in text  # the default
    assert read_last_metrics(tmp_path / "metrics.jsonl", 3) == []


def test_model_card_has_no_secret_and_no_machine_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    values = saved()
    values["reward"]["judge"]["base_url"] = "https://user:password@judge"  # type: ignore[index]
    values["trainer"]["experiment_name"] = "0123456789abcdef"  # type: ignore[index]
    run = tmp_path / "0123456789abcdef"
    card = format_model_card(values, run, 1, "policy", "/home/alice/models/base", "")
    hidden = ("0123456789abcdef", "password", "alice", "base_model")
    assert [text for text in hidden if text in card] == [] and "gsm8k/train.parquet" in card
