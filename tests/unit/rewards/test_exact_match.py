import pytest

from alphaapollo.rewards.short_answers import grade_exact
from alphaapollo.types import Outcome, Prompt


def score(truth, text):
    return grade_exact(Prompt(0, "exact", "?", truth), text)


@pytest.mark.parametrize(
    ("reward", "outcome", "texts"),
    [
        (1.0, Outcome.SCORED, ["<answer>the cat</answer>", "hm\n<answer> the\n cat </answer> done", "the cat"]),
        (0.0, Outcome.SCORED, ["The cat", "it is the cat", "<answer>the dog</answer> the cat"]),
        (0.0, Outcome.WRONG_FORMAT, ["<answer>the cat", "<answer></answer>", " "]),
    ],
)
def test_word_for_word(reward, outcome, texts):
    for result in (score("the cat", text) for text in texts):
        assert (result.reward, result.accuracy, result.outcome) == (reward, reward, outcome)
