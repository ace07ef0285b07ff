import pytest

from alphaapollo.rewards.registry import check_prompts_are_gradable, get_grader, load_grader
from alphaapollo.types import Outcome, Prompt


@pytest.mark.parametrize(
    ("grader", "data_sources"),
    [
        ("gsm8k", ["openai/gsm8k", "gsm8k", "ChilleD/SVAMP"]),
        ("math", ["DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "HuggingFaceH4/aime_2024", "math"]),
        ("math", ["BytedTsinghua-SIA/DAPO-Math-17k"]),
        ("exact", ["exact"]),
        ("search", ["rajpurkar/squad_v2"]),
        ("search_f1", ["search_f1/mine"]),
        ("multiple_choice", ["cais/mmlu"]),
        (
            "code",
            ["openai/openai_humaneval", "codeparrot/apps", "apps", "codecontests", "codeforces", "taco", "kodcode"],
        ),
        ("search", ["searchR1_nq", "searchR1_2wikimultihopqa", "searchR1_bamboogle"]),
        ("judge", ["judge/essays"]),
        ("rubric", ["rubric"]),
        ("pairwise", ["pairwise/math"]),
    ],
)
def test_data_sources_find_their_grader(grader, data_sources):
    assert {get_grader(data_source) for data_source in data_sources} == {grader}


def grade(data_source, truth, text):
    return load_grader(data_source)(Prompt(0, data_source, "?", truth), text)


@pytest.mark.parametrize(
    ("data_source", "truth", "right", "wrong", "unreadable"),
    [
        ("gsm8k", "18", ["#### 18", "18.0"], ["#### 19"], ["I do not know"]),
        ("gsm8k", "9 * 2 = <<9*2=18>>18\n#### 18", ["18"], ["9"], []),
        ("math", "5", ["5"], ["6"], ["", "I do not know", r"\boxed{}"]),
        ("mmlu", "B", ["Answer: B"], ["Answer: C"], ["Who knows?"]),
        ("mmlu", "(B) Paris", ["Answer: B"], ["A"], []),
        ("search", "Paris", ["Paris"], ["London"], ["", " ", "<answer></answer>"]),
        ("search_f1", "Paris", ["Paris"], ["London"], ["", " ", "<answer></answer>"]),
    ],
)
def test_right_wrong_and_unreadable_answers(data_source, truth, right, wrong, unreadable):
    kinds = ((right, 1.0, Outcome.SCORED), (wrong, 0.0, Outcome.SCORED), (unreadable, 0.0, Outcome.WRONG_FORMAT))
    for texts, reward, outcome in kinds:
        for score in (grade(data_source, truth, text) for text in texts):
            assert (score.reward, score.accuracy, score.outcome) == (reward, reward, outcome)


@pytest.mark.parametrize(
    ("data_source", "truths", "reason"),
    [
        ("gsm8k", [None, "", "many"], "has no number"),
        ("math", [None, ""], "not a mathematical expression"),
        ("exact", [None], "no accepted answer"),
        ("mmlu", [None, "", "Paris", "2"], "not a letter"),
        ("search", [None, "", " ", "[]", "{}", '{"target": []}'], "no accepted answer"),
    ],
)
def test_unreadable_ground_truth_raises(data_source, truths, reason):
    for truth in truths:
        with pytest.raises(ValueError, match=reason):
            grade(data_source, truth, "5")


def test_unknown_data_source_error_lists_known_patterns():
    with pytest.raises(ValueError, match=r"'poems'.*function\.path.*\*gsm8k\*"):
        get_grader("poems")
    with pytest.raises(ValueError, match="rows without a data_source"):
        get_grader("")


def test_every_prompt_needs_a_grader_and_a_ground_truth():
    prompts = [Prompt(id, "gsm8k", "?", truth) for id, truth in enumerate(["1", None])]
    check_prompts_are_gradable(prompts[:1])
    with pytest.raises(ValueError, match=r"1 of 2 .*no ground truth.* row 1"):
        check_prompts_are_gradable(prompts)
    with pytest.raises(ValueError, match="data_source 'poems'"):
        check_prompts_are_gradable([Prompt(0, "poems", "?", "1")])
