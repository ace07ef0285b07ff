"""A teacher that cannot read the policy's tokens is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alphaapollo.config.schema import Model, Teacher
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.trainer.setup.teacher_checks import check_teacher_vocabulary
from examples.quickstart.make_task import make_tokenizer

SIZE = 272  # of the quickstart's vocabulary


def make(folder: Path, size: int = SIZE, more_words: tuple[str, ...] = ()) -> str:
    """A tokenizer, and a configuration with a head of `size` rows."""
    make_tokenizer(folder, more_words)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    return str(folder)


def check(teacher: str, divergence: str, policy: str) -> list[str]:
    own = Teacher(divergence=divergence, model={"path": teacher})
    return check_teacher_vocabulary(
        "teacher.model", own.model, own, Model(path=policy), Renderer(load_tokenizer(policy))
    )


def test_the_same_tokenizer_allows_every_divergence(tmp_path: Path) -> None:
    policy, teacher = make(tmp_path / "policy"), make(tmp_path / "teacher", SIZE + 16)
    for divergence in ("sampled", "reverse", "forward", "jsd"):
        assert check(teacher, divergence, policy) == []


def test_other_token_ids_are_always_refused(tmp_path: Path) -> None:
    policy = make(tmp_path / "policy", more_words=("<left>", "<right>"))
    teacher = make(tmp_path / "teacher", more_words=("<right>", "<left>"))
    for divergence in ("sampled", "jsd"):
        with pytest.raises(ValueError, match=r"or has them with another id: '<left>', '<right>'") as caught:
            check(teacher, divergence, policy)
        assert "docs/expert_iteration.md" in str(caught.value)


def test_more_tokens_are_refused_for_full_distributions(tmp_path: Path) -> None:
    policy, teacher = make(tmp_path / "policy"), make(tmp_path / "teacher", SIZE + 16, ("<left>",))
    assert check(teacher, "sampled", policy) == []
    with pytest.raises(
        ValueError, match=r"has tokens that the policy lacks: '<left>'\. Set teacher.divergence=sampled"
    ):
        check(teacher, "reverse", policy)


def test_a_smaller_head_is_refused_for_full_distributions(tmp_path: Path) -> None:
    policy, teacher = make(tmp_path / "policy", SIZE + 16), make(tmp_path / "teacher")
    assert check(teacher, "sampled", policy) == []
    with pytest.raises(ValueError, match="computes 272 logits, fewer than the policy's 288"):
        check(teacher, "forward", policy)


def test_another_chat_template_is_a_notice(tmp_path: Path) -> None:
    policy, teacher = make(tmp_path / "policy"), make(tmp_path / "teacher")
    template = tmp_path / "teacher" / "chat_template.jinja"
    assert template.exists()
    template.write_text("{{ messages[0].content }}")
    (notice,) = check(teacher, "sampled", policy)
    assert "has another chat template" in notice
