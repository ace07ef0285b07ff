"""Can the teacher read what the policy writes? Held against both tokenizers before a worker starts."""

from __future__ import annotations

from alphaapollo.config.schema import Model, Teacher
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.models.load import load_config

KEY = "teacher.model.path"
SHOWN = 3  # tokens that differ


def check_teacher_tokens(teacher: Teacher, policy: Model, renderer: Renderer) -> list[str]:
    """What to tell of the teacher's chat template. renderer: of the policy.

    The teacher reads the policy's token ids, so each of them must mean the same to it; that is all that `sampled`
    needs. Whole distributions also need that it knows no other tokens, and rows of its head for all those of the
    policy's.

    Raises:
        ValueError: it has another tokenizer, or a smaller head.
    """
    own = load_tokenizer(teacher.model.path, teacher.model.trust_remote_code)
    known, written = own.get_vocab(), renderer.tokenizer.get_vocab()
    other = [token for token, number in written.items() if known.get(token) != number]
    if other:
        raise ValueError(
            f"{KEY}={teacher.model.path}: another tokenizer than the policy's: {_named(other, written)} "
            "mean something else to it or nothing, and it reads token ids. Give a teacher with the policy's tokenizer "
            "(a larger model of its family, say), or train on the teacher's texts (docs/expert_iteration.md)."
        )
    fix = "Set teacher.divergence=sampled, which needs the policy's tokens alone, or give another teacher."
    more = [token for token in known if token not in written]
    if teacher.whole and more:
        raise ValueError(
            f"teacher.divergence={teacher.divergence} compares distributions over one vocabulary, and {KEY}="
            f"{teacher.model.path} has tokens that the policy lacks: {_named(more, known)}. {fix}"
        )
    rows, needed = _rows(_model(teacher)), _rows(policy)
    if teacher.whole and rows < needed:
        raise ValueError(
            f"teacher.divergence={teacher.divergence}: the head of {KEY}={teacher.model.path} has {rows} rows, and the "
            f"policy's {needed}, of which some would have no counterpart. {fix}"
        )
    if own.chat_template == renderer.tokenizer.chat_template:
        return []
    return [f"{KEY}={teacher.model.path} has another chat template than the policy, and reads the policy's."]


def _model(teacher: Teacher) -> Model:
    return Model(path=teacher.model.path, trust_remote_code=teacher.model.trust_remote_code)


def _rows(model: Model) -> int:
    return int(load_config(model).get_text_config().vocab_size)


def _named(tokens: list[str], numbers: dict[str, int]) -> str:
    """`'a' (17), 'b' (4) and 20 more`"""
    first = sorted(tokens, key=lambda token: numbers[token])[:SHOWN]
    rest = f" and {len(tokens) - SHOWN} more" if len(tokens) > SHOWN else ""
    return ", ".join(f"{token!r} ({numbers[token]})" for token in first) + rest
