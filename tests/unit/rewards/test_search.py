import pytest

from alphaapollo.rewards.short_answers import grade_search, grade_search_f1, normalize_to_words
from alphaapollo.types import Prompt


def prompt(truth):
    return Prompt(0, "search", "?", truth)


def test_squad_normalization():
    assert normalize_to_words("The  Eiffel-Tower, an “icon”!") == ["eiffeltower", "“icon”"]
    assert normalize_to_words("A theory of the a.") == ["theory", "of"]


@pytest.mark.parametrize(
    ("text", "exact", "f1"),
    [
        ("<answer>The city of light.</answer> or not", 1.0, 1.0),
        ("paris", 1.0, 1.0),
        # "city of lights": 2 of 3 words, and 2 of 3 of "city of light"
        ("<answer>city of lights</answer>", 0.0, 2 / 3),
        # 1 of 5 words, and the 1 word of "Paris": 2 * 1 / (5 + 1)
        ("It is Paris in France", 0.0, 1 / 3),
        ("London", 0.0, 0.0),
        ("?!", 0.0, 0.0),
    ],
)
def test_the_best_accepted_answer_counts(text, exact, f1):
    truth = prompt('["Paris", "City of Light"]')
    score = grade_search(truth, text)
    assert (score.reward, score.accuracy) == (exact, exact)
    assert score.components["f1"] == pytest.approx(f1, rel=1e-12)
    score = grade_search_f1(truth, text)
    assert (score.reward, score.accuracy) == (pytest.approx(f1, rel=1e-12), exact)
