import pytest

from alphaapollo.rewards.exact_match import grade
from alphaapollo.types import Outcome, Prompt


def score(truth, text):
    return grade(Prompt(id=0, data_source="exact", content="?", ground_truth=truth), text)


@pytest.mark.parametrize(
    ("text", "reward", "outcome"),
    [
        ("<answer>the cat</answer>", 1.0, Outcome.SCORED),
        ("hm\n<answer> the\n cat </answer> done", 1.0, Outcome.SCORED),
        ("the cat", 1.0, Outcome.SCORED),
        ("The cat", 0.0, Outcome.SCORED),
        ("it is the cat", 0.0, Outcome.SCORED),
        ("<answer>the dog</answer> the cat", 0.0, Outcome.SCORED),
        ("<answer>the cat", 0.0, Outcome.WRONG_FORMAT),
        ("<answer></answer>", 0.0, Outcome.WRONG_FORMAT),
        (" ", 0.0, Outcome.WRONG_FORMAT),
    ],
)
def test_word_for_word(text, reward, outcome):
    result = score("the cat", text)
    assert (result.reward, result.accuracy, result.outcome) == (reward, reward, outcome)


def test_no_ground_truth_is_a_failure():
    with pytest.raises(ValueError, match="no ground truth"):
        score(None, "x")
