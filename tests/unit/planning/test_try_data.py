"""The first rows of each data source are graded against their own ground truth before a run starts."""

import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.planning.trials import NUM_ROWS, describe_sources, try_ground_truths
from alphaapollo.types import Prompt
from tests.unit.tiny import save_tokenizer


def make_prompts(source, *truths, **extra_info):
    return [
        Prompt(index, source, "?", truth, extra_info, location=f"train.parquet, row {index}")
        for index, truth in enumerate(truths)
    ]


def test_ground_truths_that_score():
    prompts = [
        *make_prompts("gsm8k", "4", 4, 0.5, "#### 1,200", ["12", "34"]),
        *make_prompts("math", "4", 12, r"\frac{1}{2}", "so \\boxed{x^2}", ["1", "2"]),
        *make_prompts("exact", "Paris", ["Paris", "paris"], 7),
        *make_prompts("nq", "Paris", ["Paris"], {"target": ["a", "b"]}),
        *make_prompts("multiple_choice", "A", "(b)", "A, C", "AC"),
        *make_prompts("judge", "any", None),
    ]
    found, notices = try_ground_truths(prompts, Reward())
    assert notices == [] and [*found] == ["gsm8k", "math", "exact", "nq", "multiple_choice"]
    assert found["gsm8k"].endswith("5 of 5 rows")


UNSCORABLE = [  # one for each kind of error; tests/unit/rewards has all
    ("gsm8k", "no number"),
    ("exact", {"x": 1}),
    ("multiple_choice", 2),
    ("code", {"inputs": ["1"]}),
    ("reasoning_gym", "4"),
]


@pytest.mark.parametrize(("source", "truth"), UNSCORABLE)
def test_a_ground_truth_that_cannot_score_is_refused(source, truth):
    with pytest.raises(ValueError, match=r"train\.parquet, row 0: data_source") as error:
        try_ground_truths(make_prompts(source, truth), Reward())
    assert repr(source) in str(error.value) and repr(truth)[:20] in str(error.value)


def test_each_file_is_tried_and_only_its_first_rows():
    train = make_prompts("gsm8k", *["1"] * NUM_ROWS, "none")
    assert try_ground_truths(train, Reward()) == ({"gsm8k": "ground truth right in 20 of 20 rows"}, [])
    found, (notice,) = try_ground_truths(make_prompts("gsm8k", "1", "2", "none", "4"), Reward())
    assert "row 2" in notice and "'none'" in notice and found["gsm8k"].endswith("3 of 4 rows")
    other = [Prompt(0, "gsm8k", "?", "none", location="val.parquet, row 0")]
    with pytest.raises(ValueError, match=r"val\.parquet, row 0"):
        try_ground_truths([*train, *other], Reward())


def test_sources_are_described(tmp_path):
    save_tokenizer(tmp_path)
    renderer = Renderer(load_tokenizer(str(tmp_path)))
    prompts = [*make_prompts("a", "1", "2", level=3, index=1), *make_prompts("", "1")]
    found = describe_sources(prompts, renderer, {"a": "right in 2"}, reads_columns=False)
    assert [*found] == ["a", "no data_source"] and found["a"].startswith("2 rows")
    assert "right in 2" in found["a"] and found["a"].endswith("not read: level")
    assert "level" not in describe_sources(prompts, renderer, {}, reads_columns=True)["a"]
    many = [prompt for number in range(12) for prompt in make_prompts(f"s{number}", "1")]
    assert describe_sources(many, renderer, {}, True)["more"].startswith("2 ")
