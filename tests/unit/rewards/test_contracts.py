"""Reward functions as the documentation of verl, TRL, OpenRLHF and ms-swift shows them (docs/reward_functions.md)."""

import asyncio
import math
from dataclasses import replace
from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from alphaapollo.config.build import build_config
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import Config, CustomRewardFunction
from alphaapollo.rewards.base import adapt_to_episode, convert_to_score
from alphaapollo.rewards.custom import TRUTHS, convert_verl_result, load_reward_function
from alphaapollo.types import Episode, EpisodeTurn, Prompt, Score

CHAT = [{"role": "user", "content": "?"}]
PROMPT = Prompt(0, "openai/gsm8k", CHAT, ground_truth="4", extra_info={"index": 7, "task": "math"})


def load(tmp_path, source, name="compute_score", **fields):
    path = tmp_path / "reward.py"
    path.write_text(source)
    return load_reward_function(CustomRewardFunction(path=str(path), name=name, **fields))


def call(loaded, prompt=PROMPT, text="4", **fields):
    episode = Episode(text, [EpisodeTurn(text, token_ids=[5, 6])], "user: ?\n", step=3, max_steps=10)
    result = adapt_to_episode(loaded.function)(prompt, replace(episode, **fields))

    async def wait():
        return await result

    return convert_to_score(asyncio.run(wait()) if loaded.is_async else result)


TRL_COLUMNS = """
def compute_score(prompts, completions, completion_ids, trainer_state, task, ground_truth, solution, **kwargs):
    assert prompts[0][-1]["content"] == "?" and kwargs["index"] == [7] and kwargs["data_source"] == ["openai/gsm8k"]
    assert completion_ids == [[5, 6]] and (trainer_state.global_step, trainer_state.max_steps) == (3, 10)
    return [1.0 if t == "math" and g == s == "4" else None for t, g, s in zip(task, ground_truth, solution)]
"""
TRL_LOG = """
def compute_score(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    log_extra("golden", list(ground_truth))
    log_extra("size", [2])
    log_metric("accuracy", 1.0)
    return [1.0]
"""
OPENRLHF = """
import torch
def compute_score(queries, prompts, labels, **kwargs):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    assert prompts == ["user: ?\\n"]
    reward = torch.tensor([float(answer == label) for answer, label in zip(answers, labels)])
    return {"rewards": reward, "scores": reward, "extra_logs": {"dummy": reward, "mean": reward.mean(), "name": ["x"]}}
"""
SWIFT = """
from typing import List
from swift.plugin import ORM, orms
from swift.utils import get_logger
logger = get_logger()
class Accuracy(ORM):
    def __call__(self, completions, solution, **kwargs) -> List[float]:
        assert kwargs["messages"][0][-1] == {"role": "assistant", "content": "4"}
        return [float(content == sol) for content, sol in zip(completions, solution)]
orms["compute_score"] = Accuracy
"""
SWIFT_STATE = """
from swift.rewards import ORM, orms
class compute_score(ORM):
    def __init__(self, args=None, scale=1.0):
        super().__init__(args)
        self.scale = scale
    def __call__(self, completions, trainer_state, **kwargs):
        return [self.scale * trainer_state.global_step / trainer_state.max_steps for _ in completions]
"""
SWIFT_ASYNC = """
from swift.rewards import AsyncORM, orms
class Remote(AsyncORM):
    async def __call__(self, completions, **kwargs):
        return [1.0 for _ in completions]
orms["compute_score"] = Remote
"""


DOCUMENTED = [
    (TRL_COLUMNS, Score(1.0), ("task",)),
    (TRL_LOG, Score(1.0, {"size": 2.0, "accuracy": 1.0}, reason="golden: 4"), ()),
    (OPENRLHF, Score(1.0, {"accuracy": 1.0, "dummy": 1.0, "mean": 1.0}), ()),
    (SWIFT, Score(1.0), ()),
    (SWIFT_STATE, Score(0.3), ()),
    (SWIFT_ASYNC, Score(1.0), ()),
]


@pytest.mark.parametrize(("source", "score", "columns"), DOCUMENTED)
def test_functions_run_unchanged(tmp_path, source, score, columns):
    loaded = load(tmp_path, source)
    assert (call(loaded), tuple(name for name in loaded.columns if name not in TRUTHS)) == (score, columns)


VERL = "data_source, solution_str, ground_truth, extra_info"
VERL_BATCH = "data_sources, solution_strs, ground_truths, extra_infos, **kwargs"
VERL_DICT = "{'score': 0.5, 'acc': solution_str == ground_truth, 'pred': solution_str, 'length': len(solution_str)}"
RIGHT = Score(1.0, {"accuracy": 1.0})
FUNCTIONS = [  # parameters, returned value, score
    (f"{VERL}=None", "float((data_source, solution_str, extra_info['index']) == ('openai/gsm8k', '4', 7))", Score(1.0)),
    (f"{VERL}=None, **kwargs", VERL_DICT, Score(0.5, {"accuracy": 1.0, "length": 1.0})),
    (VERL, "{'score': await asyncio.sleep(0, 1.0), 'acc': True}", RIGHT),
    (f"{VERL}, scale, names=()", "scale * (solution_str == ground_truth) + len(names)", Score(4.0)),
    (VERL_BATCH, "[{'score': 1.0, 'acc': s == g} for s, g in zip(solution_strs, ground_truths)]", RIGHT),
    ("data_source, solution_str", "float((data_source, solution_str) == ('openai/gsm8k', '4'))", Score(1.0)),
    ("solution_str, **kwargs", "float(kwargs['extra_info']['index'] == 7 and len(kwargs) == 3)", Score(1.0)),
    ("completion_ids, **kwargs", "[float(len(ids)) for ids in completion_ids]", Score(2.0)),
    ("prompts, completions, **kwargs", "[await asyncio.sleep(0, 1.0) for completion in completions]", Score(1.0)),
    ("completions, **kwargs", "[float(completions[0][0]['content'] == kwargs['answer'][0])]", Score(1.0)),
    ("completions, other", "[float(other == [None])]", Score(1.0)),
    ("completions", "[{'score': 0.5, 'n': 1}]", Score(0.5, {"n": 1.0})),
    ("queries, prompts, labels", "__import__('torch').tensor([2.0])", Score(2.0)),
]


@pytest.mark.parametrize(("parameters", "value", "score"), FUNCTIONS)
def test_parameters_in_any_order_and_subset(tmp_path, parameters, value, score):
    kwargs = {"reward_kwargs": {"scale": 3.0, "names": ["a"]}} if "scale" in parameters else {}
    is_async = "async " if "await" in value else ""
    source = f"import asyncio\n{is_async}def compute_score({parameters}):\n    return {value}"
    loaded = load(tmp_path, source, **kwargs)
    columns = tuple(name for name in parameters.split(", ") if name in ("index", "other"))
    assert (call(loaded), tuple(name for name in loaded.columns if name not in TRUTHS)) == (score, columns)


VALUES = [["Paris", "paris"], {"target": ["a"]}, False, 12, 0.5, Decimal("1.5"), date(2024, 2, 1), b"14", [[1, 2]]]


TRUTH_ARGUMENTS = [
    ("solution_str, ground_truth", "float(ground_truth == {!r})"),
    ("completions, ground_truth, **kwargs", "[float(ground_truth == [{!r}])]"),
    ("completions, solution, **kwargs", "[float(solution == [{!r}])]"),
    ("queries, prompts, labels", "[float(labels == [{!r}])]"),
    ("prompt, completion", "float(prompt.ground_truth == {!r})"),
]


@pytest.mark.parametrize(("parameters", "value"), TRUTH_ARGUMENTS)
def test_functions_get_the_value_of_the_file(tmp_path, parameters, value):
    head = f"import datetime\nfrom decimal import Decimal\ndef compute_score({parameters}):\n    return "
    for number, truth in enumerate(VALUES):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert call(load(folder, head + value.format(truth)), replace(PROMPT, ground_truth=truth)) == Score(1.0)


TWO = """
def math_reward(completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]
async def code_reward(completions, task, **kwargs):
    return [-1.0 if t == "code" else None for t in task]
def length(completions, **kwargs):
    return [len(completions[0][0]["content"])]
def compute_score(data_source, solution_str):
    return {"score": 0.5, "acc": 1}
"""


SEVERAL = [
    (["math_reward", "length"], [1.0, 0.5], "math", Score(1.5, {"math_reward": 1.0, "length": 1.0})),
    (["math_reward", "code_reward"], [], "code", Score(-1.0, {"code_reward": -1.0})),
    (["compute_score", "length"], [2, 1], "x", Score(2.0, {"compute_score": 0.5, "accuracy": 1.0, "length": 1.0})),
]


@pytest.mark.parametrize(("name", "weights", "task", "score"), SEVERAL)
def test_several_functions_are_added(tmp_path, name, weights, task, score):
    assert call(load(tmp_path, TWO, name, weights=weights), replace(PROMPT, extra_info={"task": task})) == score


RANK = "[float(len(text) == min(map(len, texts))) for text in texts]"  # the shortest is best
TOGETHER = [  # parameters, what `texts` are, value, scores of "aa", "b", "ccc"
    ("completions, **kwargs", "[one[0]['content'] for one in completions]", RANK, [0.0, 1.0, 0.0]),
    ("solution_strs, ground_truths", "solution_strs", RANK, [0.0, 1.0, 0.0]),
    ("queries, prompts, labels", "queries", f"{{'rewards': {RANK}}}", [0.0, 1.0, 0.0]),
    (
        "queries, prompts, labels",
        "queries",
        f"{{'rewards': {RANK}, 'scores': [0.25] * 3, 'extra_logs': {{'n': 3, 'each': [1, 2, 3], 'name': ['x'] * 3}}}}",
        [Score(r, {"n": 3, "each": k, "accuracy": 0.25}) for r, k in ((0.0, 1), (1.0, 2), (0.0, 3))],
    ),
    (
        "completions, log_extra, log_metric, **kwargs",
        "[one[0]['content'] for one in completions]",
        f"(log_metric('m', 7), log_extra('size', [*map(len, texts)]), {RANK})[-1]",
        [Score(r, {"m": 7, "size": k}) for r, k in ((0.0, 2), (1.0, 1), (0.0, 3))],
    ),
]


@pytest.mark.parametrize(("parameters", "texts", "value", "scores"), TOGETHER)
@pytest.mark.parametrize("is_async", [False, True])
def test_functions_that_take_lists_get_the_completions_of_a_prompt(
    tmp_path, parameters, texts, value, scores, is_async
):
    body = f"def compute_score({parameters}):\n    texts = {texts}\n    return {value}"
    loaded = load(tmp_path, "async " * is_async + body)
    results = loaded.grade_group(PROMPT, [Episode(text, [], "") for text in ("aa", "b", "ccc")])

    async def wait():
        return await results

    found = [convert_to_score(one) for one in (asyncio.run(wait()) if is_async else results)]
    assert found == [one if isinstance(one, Score) else Score(one) for one in scores]
    assert [one.accuracy for one in found] == [one.accuracy for one in scores if isinstance(one, Score)] or all(
        one.accuracy == one.reward for one in found
    )


ACCURACIES = [  # names of functions, weights, accuracy of "4" and of "no", which is shorter than 4000 characters
    (["compute_score"], [], [1.0, 0.0]),
    (["graded"], [], [None, None]),
    (["accuracy", "graded"], [1.0, 0.1], [1.0, 0.0]),
    (["with_length"], [], [1.0, 0.0]),
    (["parts"], [], [None, None]),
]
RIGHT_OR_GRADED = """
def compute_score(prompt, completion):
    return float(prompt.ground_truth == completion)
accuracy = compute_score
def graded(completions, **kwargs):
    return [0.25 for one in completions]
def with_length(prompt, completion):
    return {"reward": compute_score(prompt, completion), "length": len(completion)}
def parts(prompt, completion):
    return {"right": compute_score(prompt, completion), "format": 0.0}
"""


@pytest.mark.parametrize(("name", "weights", "accuracies"), ACCURACIES)
def test_a_sum_or_a_graded_reward_is_no_accuracy(tmp_path, name, weights, accuracies):
    loaded = load(tmp_path, RIGHT_OR_GRADED, name, weights=weights)
    assert [call(loaded, text=text).accuracy for text in ("4", "no")] == accuracies


def test_one_weight_for_each_name():
    with pytest.raises(ConfigError, match="one weight for each name"):
        build_config(Config, {"custom_reward_function": {"path": "x.py", "name": ["f", "g"], "weights": [1.0]}})


UNAVAILABLE = [
    ("def compute_score(solution_str, tokenizer): return 1.0", "'tokenizer'"),
    ("def compute_score(solution_str, /): return 1.0", "'solution_str' .*positional only"),
    ("def compute_score(queries, tokens): return 1.0", "'tokens'"),
    ("def compute_score(prompt, completion, ground_truth): return 1.0", "'ground_truth'"),
    ("class compute_score:\n def __init__(self, size): pass\n def __call__(self, completions): pass", "'size'"),
]


@pytest.mark.parametrize(("source", "what"), UNAVAILABLE)
def test_unavailable_arguments_are_rejected(tmp_path, source, what):
    with pytest.raises(ValueError, match=rf"\.name: .*reward\.py: compute_score.*{what}"):
        load(tmp_path, source)


NO_REWARDS = [
    ("completions", "1.0", TypeError),
    ("completions", "[]", TypeError),
    ("completions", "__import__('torch').tensor(1.0)", TypeError),
    ("completions", "[None]", TypeError),
    ("completions", "[float('nan')]", ValueError),
    ("queries, prompts, labels", "{'scores': [1.0]}", KeyError),
    ("solution_str", "{'score': float('nan'), 'acc': 1}", ValueError),
    ("solution_str", "None", TypeError),
]


@pytest.mark.parametrize(("contract", "value", "error"), NO_REWARDS)
def test_results_that_are_no_reward_are_failures(tmp_path, contract, value, error):
    with pytest.raises(error):
        call(load(tmp_path, f"def compute_score({contract}):\n    return {value}"))


INCOMPLETE = [
    ({"reward": 1, "a": math.nan, "b": 2}, Score(1.0, {"b": 2.0}), ("a",)),
    ({"reward": 1, "a": math.inf}, Score(1.0), ("a",)),
    (Score(1.0, {"a": math.nan}), Score(1.0), ("a",)),
    (convert_verl_result({"score": 1, "acc": np.float32("nan")}), Score(1.0), ("accuracy",)),
]


@pytest.mark.parametrize(("result", "score", "skipped"), INCOMPLETE)
def test_a_metric_that_is_not_finite_is_left_out_and_counted(result, score, skipped):
    found = convert_to_score(result)
    assert replace(found, skipped_components=()) == score and found.skipped_components == skipped


def test_completions_of_several_turns_are_those_of_trl(tmp_path):
    source = """def compute_score(completions, completion_ids, **kwargs):
    (messages,), (ids,) = completions, completion_ids
    calls = [one["tool_calls"][0]["function"]["arguments"]["x"] for one in messages if "tool_calls" in one]
    return [float(calls[0] + len(messages) + len(ids))]"""
    function = {"type": "function", "function": {"name": "add", "arguments": {"x": 3}}}
    called = {"role": "assistant", "content": "", "tool_calls": [function]}
    first = EpisodeTurn("<tool_call>", [{"role": "tool", "content": "3"}], info={"message": called}, token_ids=[5, 6])
    loaded = load(tmp_path, source)
    assert call(loaded, turns=[first, EpisodeTurn("4", token_ids=[7])]).reward == 3 + 3 + 3
    assert call(loaded, text="", turns=[first]).reward == 3 + 2 + 2, "a limit ended the episode"
