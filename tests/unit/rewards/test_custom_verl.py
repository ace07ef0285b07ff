from dataclasses import replace

import numpy as np
import pytest

from alphaapollo.rewards.base import convert_to_score
from alphaapollo.rewards.custom import convert_verl_result, load_reward_function
from alphaapollo.types import Prompt, Score

PROMPT = Prompt(0, "openai/gsm8k", "?", ground_truth="4", extra_info={"index": 7})


def load(tmp_path, source):
    path = tmp_path / "reward.py"
    path.write_text(source)
    return load_reward_function(str(path), "compute_score")


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ("data_source, solution_str", "float((data_source, solution_str) == ('openai/gsm8k', '4'))"),
        ("ground_truth, solution_str, method='strict'", "float(solution_str == ground_truth)"),
        ("solution_str, **kwargs", "float(kwargs['extra_info']['index'] == 7 and len(kwargs) == 3)"),
        ("data_source, solution_str, ground_truth, extra_info", "float(extra_info == {'index': 7})"),
        ("*, solution_str", "float(solution_str == '4')"),
        # functions of TRL get lists of one
        ("completions, **kwargs", "[float(c[0]['content'] == a) for c, a in zip(completions, kwargs['answer'])]"),
        ("prompts, completions, index", "[float(p[0]['content'] == '?' and i == 7) for p, i in zip(prompts, index)]"),
        ("completions, ground_truth, **kwargs", "[1.0 if ground_truth == ['4'] else None]"),
    ],
)
def test_parameters_of_verl_and_trl_in_any_order_and_subset(tmp_path, parameters, value):
    function = load(tmp_path, f"def compute_score({parameters}):\n    return {value}")
    assert convert_to_score(function(replace(PROMPT, content=[{"role": "user", "content": "?"}]), "4")) == Score(1.0)


def test_verl_result_is_converted():
    result = {"score": -0.5, "acc": True, "pred": "7", "reason": None, "length": np.float32(2), "reward": 9}
    assert convert_to_score(convert_verl_result(result)) == Score(-0.5, {"accuracy": 1.0, "length": 2.0})
    assert convert_verl_result({"a": 1.0}) == {"a": 1.0} and convert_verl_result(0.5) == 0.5
    with pytest.raises(TypeError, match="component 'reward' is a str"):
        convert_to_score(convert_verl_result({"score": "high"}))


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ("solution_str, tokenizer", "'tokenizer'"),
        ("data_sources, solution_strs, ground_truths, extra_infos", "'ground_truths'"),
        ("solution_str, /", "'solution_str' .*positional only"),
    ],
)
def test_unavailable_arguments_are_rejected(tmp_path, parameters, what):
    with pytest.raises(ValueError, match=rf"\.name: .*reward\.py: compute_score.*{what}"):
        load(tmp_path, f"def compute_score({parameters}):\n    return 1.0")


def test_functions_of_trl_get_texts_for_a_text_prompt(tmp_path):
    function = load(tmp_path, "def compute_score(completions, **kwargs):\n    return [float(completions == ['4'])]")
    assert convert_to_score(function(PROMPT, "4")) == Score(1.0)
