import pytest

from alphaapollo.rewards.registry import check_prompts_are_gradable, get_grader
from alphaapollo.types import Prompt


@pytest.mark.parametrize(
    ("data_source", "grader"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("gsm8k", "gsm8k"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("HuggingFaceH4/aime_2024", "math"),
        ("math", "math"),
        ("exact", "exact"),
        ("ChilleD/SVAMP", "gsm8k"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "math"),
        ("rajpurkar/squad_v2", "search"),
        ("search_f1/mine", "search_f1"),
        ("cais/mmlu", "multiple_choice"),
        ("openai/openai_humaneval", "code"),
        ("codeparrot/apps", "code"),
        ("judge/essays", "judge"),
        ("rubric", "rubric"),
        ("pairwise/math", "pairwise"),
    ],
)
def test_data_sources_find_their_grader(data_source, grader):
    assert get_grader(data_source).name == grader


def test_unknown_data_source_error_lists_known_patterns():
    with pytest.raises(ValueError, match=r"data_source 'poems'.*custom_reward_function\.path.*gsm8k: \*gsm8k\*"):
        get_grader("poems")
    with pytest.raises(ValueError, match="rows without a data_source"):
        get_grader("")


def test_every_prompt_needs_a_grader_and_a_ground_truth():
    prompts = [
        Prompt(id=i, data_source="gsm8k", content="?", ground_truth=truth) for i, truth in enumerate(["1", None])
    ]
    check_prompts_are_gradable(prompts[:1])
    with pytest.raises(ValueError, match=r"1 of 2 prompts have no ground truth; the first of them is row 1"):
        check_prompts_are_gradable(prompts)
    with pytest.raises(ValueError, match="no reward function for data_source 'poems'"):
        check_prompts_are_gradable([Prompt(id=0, data_source="poems", content="?", ground_truth="1")])
