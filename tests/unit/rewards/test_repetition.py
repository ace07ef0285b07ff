import pytest

from alphaapollo.rewards.components import score_distinct_ngrams
from alphaapollo.types import Prompt


def score(text):
    return score_distinct_ngrams(Prompt(0, "", "?"), text)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 1.0),
        ("one two three", 1.0),
        ("one two three four five", 1.0),
        ("a a a a a", 1 / 2),  # 2 4-grams, both alike
        ("a b c d a b c d", 4 / 5),  # abcd bcda cdab dabc abcd
        ("x = 1; x = 1; x = 1;", 4 / 9),  # 12 words: 9 4-grams of a period of 4
        ("!" * 13, 1 / 10),  # each mark is a word
        ("我们我们我们", 2 / 3),  # 6 words: 我们我们 们我们我 我们我们
        ("да да да да да да", 1 / 3),
        ("x中y x中y", 1.0),  # 6 words: x中yx 中yxx yxx.. differ
    ],
)
def test_the_share_of_different_4_grams(text, share):
    assert score(text) == pytest.approx(share, rel=1e-15)


def test_loop_scores_near_zero():
    assert score("wait, let me check again. " * 4_000) < 0.001
    assert score("?" * 100_000) < 0.001
