from __future__ import annotations

from alphaapollo.utils.text import fill_template


def test_braces_in_values_and_of_other_names_stay() -> None:
    filled = fill_template("Q {question} A {answer} {other}", question="{answer}?", answer="{question}")
    assert filled == "Q {answer}? A {question} {other}"
