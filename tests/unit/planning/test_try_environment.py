import asyncio
import re
from dataclasses import replace

import pytest

from alphaapollo.config.schema import CustomRewardFunction, Env, Judge, Reward
from alphaapollo.environments import base
from alphaapollo.environments.base import Observation
from alphaapollo.planning.trials import grade_trial_answers, try_environment_resets, try_reward_function
from alphaapollo.types import Message, Prompt
from tests.unit.environments.episode_helpers import game

ROWS = [Prompt(5, "text", "?"), Prompt(6, "text", "?")]
GAME = game("guessing_game")  # registered before `registered` copies the names


class Playful:
    """Environment that records its calls and fails where the test requests it."""

    def __init__(self, services):
        self.called = []
        Playful.last = self
        self.fail("make")

    failing = ""
    error: BaseException = ValueError("broken")

    def fail(self, where):
        self.called.append(where)
        if where == Playful.failing:
            raise Playful.error

    def reset(self, prompt):
        self.fail("reset")
        return Observation([Message(role="user", content=f"row {prompt.id}")])

    def step(self, action):
        raise AssertionError("the trial only resets")

    async def close(self):
        self.fail("close")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    entries = {**base._ENVIRONMENTS._entries}
    monkeypatch.setattr(base._ENVIRONMENTS, "_entries", entries)
    base.register_environment("playful")(Playful)
    monkeypatch.setattr(Playful, "failing", "")
    monkeypatch.setattr(Playful, "error", ValueError("broken"))


def trial(**settings):
    asyncio.run(try_environment_resets(Env(env_name="playful", **settings), ROWS))


def test_an_environment_that_starts_is_closed_again():
    trial()
    assert Playful.last.called == ["make", "reset", "close"]


@pytest.mark.parametrize("where", ["make", "reset", "close"])
def test_a_failure_names_its_row(monkeypatch, where):
    monkeypatch.setattr(Playful, "failing", where)
    what = {"make": "creation"}.get(where, f"Playful.{where}")
    with pytest.raises(ValueError, match=rf"=playful, row 5: .*{what}: ValueError: broken"):
        trial()
    assert Playful.last.called == {"make": ["make"]}.get(where, ["make", "reset", "close"])


def test_an_exit_is_a_failure(monkeypatch):
    monkeypatch.setattr(Playful, "failing", "reset")
    monkeypatch.setattr(Playful, "error", SystemExit(3))
    with pytest.raises(ValueError, match=r"reset: RuntimeError: .*exit \(3\)"):
        trial()


def test_first_observation_that_is_none_or_never_returned(monkeypatch):
    monkeypatch.setattr(Playful, "reset", lambda self, prompt: 7)
    with pytest.raises(ValueError, match=r"reset must be an Observation .*not int"):
        trial()

    async def never(self, prompt):
        await asyncio.Event().wait()

    monkeypatch.setattr(Playful, "reset", never)
    with pytest.raises(ValueError, match=r"row 5: .* env\.episode_timeout=0\.01 s"):
        trial(episode_timeout=0.01)


@pytest.mark.parametrize(
    ("template", "notice"),
    [("1-{foo}", "env.prompt: {foo} "), (r'Of {numbers}: \boxed{n}, \frac{a}{b} or {"guess": 3}', None)],
)
def test_an_unknown_placeholder_is_reported(template, notice):
    notices = asyncio.run(try_environment_resets(GAME.model_copy(update={"prompt": template}), ROWS))
    assert [one.startswith(notice) for one in notices] == [True] * (notice is not None)


ROW = Prompt(3, "text", "?", ground_truth="7")
FUNCTION = "def compute_score(prompt, completion):\n    "
ANSWER = "return float(completion == '<answer>7</answer>' or completion.index('<answer>'))"
TASK = "def compute_score(completions, task, **kwargs):\n    return [float(each in ('math', None)) for each in task]"
REFUSED = [  # function, columns of the second row, error
    (FUNCTION + "pass", {}, "5 of 5 .*row 3, .*'<answer>7</answer>': .*the reward is a NoneType"),
    (FUNCTION + "return 'good'", {}, "5 of 5 .*row 3, .*'<answer>7</answer>': .*the reward is a str"),
    (FUNCTION + "return {'accuracy': None}", {}, "5 of 5 .*row 3, .*'<answer>7</answer>': .*accuracy"),
    (FUNCTION + "return prompt.truth", {}, "5 of 5 .*row 3, .*'<answer>7</answer>': .*no attribute 'truth'"),
    (FUNCTION + ANSWER, {}, r"4 of 5 .*substring .*mine\.py, line 2:"),
    (TASK, {"tasks": "math"}, "compute_score needs 'task'"),
]
LABELS = "def compute_score(queries, prompts, labels{}):\n    return {{'rewards': [1.0] * len(queries)}}"
NOTICED = [
    (FUNCTION + "return float(completion[8] == prompt.ground_truth)", {}, [r"on 2 of 5 .*e\.g\. '7': .*, line 2: ret"]),
    (FUNCTION + "return {'reward': 1, 'length': len(completion)}", {}, []),
    (TASK, {"task": "math"}, []),
]


@pytest.fixture
def custom(tmp_path):
    """Function that writes a reward function to a file."""

    def write(source):
        (tmp_path / "mine.py").write_text(source)
        return CustomRewardFunction(path=str(tmp_path / "mine.py"))

    return write


def try_function(custom, columns):
    return asyncio.run(try_reward_function([ROW, replace(ROW, extra_info=columns)], Reward(), custom))


@pytest.mark.parametrize(("source", "columns", "says"), REFUSED)
def test_a_reward_function_that_fails_on_most_answers_is_refused(custom, source, columns, says):
    with pytest.raises(ValueError, match=rf"mine\.py: .*{says}"):
        try_function(custom(source), columns)


@pytest.mark.parametrize(("source", "columns", "says"), NOTICED)
def test_a_reward_function_that_fails_on_some_answers_is_a_notice(custom, source, columns, says):
    notices = try_function(custom(source), columns)
    assert [bool(re.search(*pair)) for pair in zip(says, notices, strict=True)] == [True] * len(says)


LIST = "def compute_score(completion_ids, **kwargs):\n    texts = [*map(str, kwargs['completions'])]\n    "
COMPARED = "return [float(len(text) == min(map(len, texts))) for text in texts]"
ACCURACY = FUNCTION + "return {'right': float(prompt.ground_truth in completion), 'short': 1 / (1 + len(completion))}"
TRIED = [  # function, key, needed for, pattern of the notice, pattern of the error
    (LIST + COMPARED, "", [], r"compares the answers .*'<answer>7</answer>': \[0\.0, 1\.0\]", ""),
    (LIST + "return [1.0]", "", [], "", r"fails on a list of two .* for 2 completions is \[1\.0\]"),
    (ACCURACY, "", [], r"pass@k .*\.accuracy to the component .*\(right, short\)\. Without", ""),
    (ACCURACY, "", ["trainer.keep_best=val/accuracy"], "", r"keep_best=val/accuracy: .*\(right, short\), or change"),
    (ACCURACY, "right", ["trainer.keep_best=val/accuracy"], "", ""),
    (FUNCTION + "return 0.9 * bool(completion)", "", [], "unknown which answers .*those that you return", ""),
]


@pytest.mark.parametrize(("source", "accuracy", "needed", "notice", "error"), TRIED)
def test_comparisons_and_unknown_accuracies_are_reported(custom, source, accuracy, needed, notice, error):
    function = custom(source).model_copy(update={"accuracy": accuracy})
    if error:
        with pytest.raises(ValueError, match=error):
            asyncio.run(try_reward_function([ROW], Reward(), function, needed))
    else:
        found = asyncio.run(try_reward_function([ROW], Reward(), function, needed))
        assert len(found) == bool(notice) and re.search(notice, "".join(found))


def test_a_function_for_the_ground_truth_needs_rows_with_one(custom):
    row = Prompt(0, "", "?", extra_info={"target": "5"})
    with pytest.raises(ValueError, match=r"mine\.py: .*needs 'labels', but no row has a ground truth.* target"):
        asyncio.run(try_reward_function([row], Reward(), custom(LABELS.format(""))))
    assert asyncio.run(try_reward_function([row], Reward(), custom(LABELS.format("=None")))) == []
    reads = custom(FUNCTION + "return float(prompt.ground_truth is not None and prompt.ground_truth in completion)")
    (notice,) = asyncio.run(try_reward_function([row], Reward(), reads))
    assert "target" in notice and "data.ground_truth_key" in notice
    other = replace(row, data_source="other", ground_truth="5")
    assert len(asyncio.run(try_reward_function([other, row], Reward(), reads))) == 1
    rows = [row, replace(row, ground_truth="5")]
    assert asyncio.run(try_reward_function(rows, Reward(), reads)) == []
    assert asyncio.run(try_reward_function(rows, Reward(), custom(LABELS.format("")))) == []


def test_a_component_is_tried(tmp_path):
    path = tmp_path / "component.py"
    decorator = "from alphaapollo.rewards.components import reward_component\n\n@reward_component\n"
    path.write_text(decorator + "def polite(prompt, completion):\n    return prompt.words\n")
    reward = Reward(custom_module=str(path), components={"polite": 0.5})
    row = Prompt(3, "openai/gsm8k", "?", ground_truth="7")
    with pytest.raises(ValueError, match=r"component\.py: .* 5 of 5 .*'words'"):
        asyncio.run(try_reward_function([row], reward, CustomRewardFunction()))


def test_a_policy_that_judges_itself_is_not_tried(custom):
    weights = {"rubric": 0.5, "format": 0.1}
    reward = Reward(components=weights, required=["rubric"], judge=Judge(backend="policy"))
    function = custom(FUNCTION + "return 1.0")
    assert asyncio.run(try_reward_function([ROW], reward, function)) == []
    scores, *_ = asyncio.run(grade_trial_answers(ROW, reward, function))
    assert all(score.components.keys() == {"accuracy", "task", "format"} for score in scores.values())
