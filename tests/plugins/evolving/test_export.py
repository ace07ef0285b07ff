from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from alphaapollo.data.prompts import load_prompts
from alphaapollo.plugins.evolving.export import main, make_training_rows
from alphaapollo.plugins.evolving.pool import Candidate, Grade, Judgement, Pool, Position, Verdict
from alphaapollo.plugins.evolving.verifier_reward import compute_score
from alphaapollo.types import Message, Outcome, Score


def chat(*texts: str) -> tuple[Message, ...]:
    roles = ("user", "assistant", "user", "assistant")
    return tuple(Message(role=role, content=text) for role, text in zip(roles, texts, strict=False))


def fill(folder: Path) -> Pool:
    """Two rounds of one problem: a wrong candidate, then a right one with a tool turn. The votes are the opposite."""
    made = [
        (Position(7, 0, 0, 0), (), chat("2+2?", "5"), 0.0, (2, 1)),
        (Position(7, 1, 0, 0), ("p7.r0.b0.i0",), chat("2+2? before: 5", "call", "4", "so 4"), 1.0, (0, 3)),
    ]
    with Pool(folder) as pool:
        for position, parents, messages, reward, votes in made:
            grade = Grade(Outcome.SCORED, reward, reward)
            pool.append(Candidate(position.key, position, "m", parents, messages, 1, "s", "s", None, grade))
            verdict = Verdict("m", chat(f"judge {messages[-1]['content']}"), True, "report")
            pool.append(Judgement(position.key, *votes, "report", (verdict,)))
    return pool


def test_rows_by_truth_and_by_votes(tmp_path: Path) -> None:
    pool = fill(tmp_path)
    rows = make_training_rows(pool, "truth", 4)
    (example,), (pair,), judged = rows["sft"], rows["preference"], rows["verifier"]
    assert [one["content"] for one in example["messages"]] == ["2+2? before: 5", "call", "4", "so 4"]
    assert [one["content"] for one in pair["prompt"]] == ["2+2?"], "without past solutions"
    assert [one["content"] for one in pair["chosen"]] == ["call", "4", "so 4"]
    assert [one["content"] for one in pair["rejected"]] == ["5"]
    assert [row["reward_model"]["ground_truth"] for row in judged] == ["wrong", "right"]
    by_votes = make_training_rows(pool, "votes", 4)
    assert by_votes["sft"][0]["messages"][-1]["content"] == "5" and by_votes["verifier"] == []


def test_exported_files_are_valid_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    assert main([str(tmp_path), str(tmp_path / "out")]) == 0
    assert "verifier.parquet: 2 rows" in capsys.readouterr().out
    prompts = load_prompts(str(tmp_path / "out/verifier.parquet"), "prompt")
    assert [prompt.ground_truth for prompt in prompts] == ["wrong", "right"]
    assert set(pd.read_parquet(tmp_path / "out/preference.parquet")) >= {"prompt", "chosen", "rejected"}
    assert compute_score(prompts[1], "fine\nVERDICT: right") == Score(1.0, {"accuracy": 1.0})
    assert compute_score(prompts[0], "fine\nVERDICT: right").reward == 0
    assert compute_score(prompts[0], "fine").outcome is Outcome.WRONG_FORMAT


def test_folder_without_a_pool_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "has no pool.jsonl" in capsys.readouterr().err
