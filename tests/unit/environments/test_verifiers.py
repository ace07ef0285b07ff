"""Tests with the verifiers library if it is installed, else with a fake."""

import asyncio
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import check_environment
from alphaapollo.environments import verifiers as adapter
from alphaapollo.types import Message, Prompt, Score
from tests.unit.environments.episode_helpers import check_results, make, play, random_agent

REAL = importlib.util.find_spec("verifiers") is not None
ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset

class Countdown(vf.MultiTurnEnv):
    """Ends at the correct answer; counts the wrong ones."""

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == "raise":
            raise ValueError("broken")
        if said == "error":
            raise vf.Error("no sandbox")
        if state["answer"] in said:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"wrong {len(state['trajectory'])}"}]

def right(completion, answer, **kwargs):
    return float(any(answer in message["content"] for message in completion if message["role"] == "assistant"))

def brief(completion, **kwargs):
    return 1.0 / len(completion)

def best(completions, **kwargs):
    return [0.0 for _ in completions]

def load_environment(rows=2, max_turns=4, tool=False, group=False):
    data = Dataset.from_list([{"question": f"{i} and 1?", "answer": str(i + 1)} for i in range(rows)])
    test = Dataset.from_list([{"question": "7 and 1?", "answer": "8"}])
    rubric = vf.Rubric(funcs=[best] if group else [right, brief], weights=[1.0] if group else [1.0, 0.0])
    tools = [vf.Tool(name="add", description="Adds.", parameters={})] if tool else None
    return Countdown(max_turns=max_turns, dataset=data, eval_dataset=test, rubric=rubric, tool_defs=tools)
'''


class Rows(list):
    @classmethod
    def from_list(cls, rows):
        return cls({**row, "prompt": [{"role": "user", "content": row["question"]}]} for row in rows)


class Error(Exception):
    """Fake of verifiers.Error."""


class Rubric:
    """Fake of verifiers.Rubric."""

    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights
        self.cleaned = 0

    async def score_rollout(self, state):
        found = {one.__name__: one(completion=state["completion"], answer=state["answer"]) for one in self.funcs}
        state["metrics"] = found
        state["reward"] = sum(weight * value for weight, value in zip(self.weights, found.values(), strict=True))

    async def cleanup(self, state):
        self.cleaned += 1


class Environment:
    """Fake of verifiers.Environment."""

    message_type = "chat"

    @property
    def requires_group_rollouts(self):
        return any("completions" in one.__code__.co_varnames for one in self.rubric.funcs)


class MultiTurnEnv(Environment):
    """Fake of verifiers.MultiTurnEnv: alternates the client and `env_response`."""

    def __init__(self, max_turns, dataset, eval_dataset, rubric, tool_defs):
        self.max_turns, self.rubric, self.tool_defs = max_turns, rubric, tool_defs
        self.data, self.eval_data = dataset, eval_dataset

    def get_dataset(self):
        return self.data

    def get_eval_dataset(self):
        return self.eval_data

    async def rollout(self, input, client, model, sampling_args):
        state = {**input, "trajectory": [], "error": None, "final_env_response": None, "completion": []}
        chat = list(input["prompt"])
        try:
            while len(state["trajectory"]) < self.max_turns:
                if state["trajectory"]:
                    chat = [*chat, *await self.env_response(chat, state)]
                    if state["final_env_response"] is not None:
                        break
                chat = [*chat, await self.ask(client, model, chat)]
                state["trajectory"].append(chat[-1])
        except Error as error:
            state["error"] = error
        return state | {"completion": chat[len(input["prompt"]) :]}

    async def ask(self, client, model, chat):
        try:
            asked = {"tools": self.tool_defs} if self.tool_defs else {}
            response = await client.client.chat.completions.create(model=model, messages=chat, **asked)
        except Exception as error:
            raise Error() from error
        return {"role": "assistant", "content": response.choices[0].message.content}


def load_environment(name, **arguments):
    return importlib.import_module(name).load_environment(**arguments)


def fake_modules() -> dict[str, ModuleType]:
    """Fake modules with the parts of verifiers 0.1.14 that the adapter and the environment above use."""
    package, datasets = ModuleType("verifiers"), ModuleType("datasets")
    vars(package).update(Error=Error, Rubric=Rubric, Environment=Environment, MultiTurnEnv=MultiTurnEnv)
    vars(package).update(Tool=SimpleNamespace, load_environment=load_environment)
    vars(package).update(__spec__=SimpleNamespace(name="verifiers"))
    clients = ModuleType("clients")
    vars(clients).update(OpenAIChatCompletionsClient=lambda client: SimpleNamespace(client=client))
    vars(datasets).update(Dataset=Rows)
    return {"verifiers": package, "verifiers.envs.environment": ModuleType("environment"), "datasets": datasets} | {
        "verifiers.clients": clients
    }


@pytest.fixture(autouse=True)
def countdown(tmp_path, monkeypatch):
    (tmp_path / "countdown_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    if not REAL:
        for name, module in fake_modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    adapter._load_cached_environment.cache_clear()
    yield
    adapter._load_cached_environment.cache_clear()
    sys.modules.pop("countdown_env", None)


def env(max_steps: int = 9, **args) -> Env:
    return Env(env_name="verifiers", max_steps=max_steps, verifiers={"name": "countdown_env", "args": args})


def row(index: int = 0, split: str = "train") -> Prompt:
    chat = [Message(role="user", content="The environment writes this prompt.")]
    return Prompt(0, "text", chat, extra_info={"index": index, "split": split})


def run(config: Env, prompt: Prompt, *texts: str):
    async def go():
        environment = make(config)
        try:
            first = await environment.reset(prompt)
            return first, [await environment.step(text) for text in texts]
        finally:
            await environment.close()

    return asyncio.run(go())


def test_rollout_and_rubric():
    first, (wrong, right) = run(env(), row(1), "1", "it is 2")
    assert first.messages == [Message(role="user", content="1 and 1?")]
    assert wrong.observation.messages == [Message(role="user", content="wrong 1")] and not wrong.done
    assert right.done and right.score.reward == 1.0
    parts = right.score.components
    assert (parts["right"], parts["brief"]) == (1.0, pytest.approx(0.25))  # 2 answers and 2 messages of the environment


def test_end_without_a_correct_answer():
    _, results = run(env(max_turns=2), row(), "no", "no")
    assert [result.done for result in results] == [False, True] and results[-1].score.reward == 0.0


def test_rows_select_examples():
    assert run(env(rows=2), row(3))[0].messages[0]["content"] == "1 and 1?"  # 3 modulo 2
    assert run(env(), row(3, "test"))[0].messages[0]["content"] == "7 and 1?"


@pytest.mark.parametrize(
    ("args", "text", "said"),
    [({}, "raise", "broken"), ({}, "error", "no sandbox"), ({"tool": True}, "", "native tool calls are not supported")],
)
def test_errors_are_raised(args, text, said):
    with pytest.raises((ValueError, RuntimeError), match=said):
        run(env(**args), row(), text)


def test_close_cancels_the_rollout():
    async def go() -> bool:
        environment = make(env())
        await environment.reset(row())
        rollout = environment._rollout
        await environment.close()
        return rollout.cancelled()

    assert asyncio.run(go())


def test_empty_answer_is_not_a_failure():
    _, (result,) = run(env(), row(), "")
    assert result.observation.messages[0]["content"] == "wrong 1"


def test_random_agent():
    for seed in range(200):
        check_results(play(env(max_turns=4), random_agent(seed), row(seed)), 4)


def test_signal_handlers_are_unchanged():
    import signal

    before = signal.getsignal(signal.SIGTERM)
    run(env(), row())
    assert signal.getsignal(signal.SIGTERM) is before


def test_check(monkeypatch):
    check_environment(env())
    with pytest.raises(ValueError, match=r"env\.verifiers\.name is empty"):
        check_environment(Env(env_name="verifiers"))
    with pytest.raises(ValueError, match=r"name=countdown_env: its rubric compares the episodes of a group"):
        check_environment(env(group=True))
    with pytest.raises(ValueError, match=r"uses native tool calls \(add\), which are not supported"):
        check_environment(env(tool=True))
    with pytest.raises(ValueError, match=r"cannot be loaded with env\.verifiers\.args=\{'colour': 1\} .*colour"):
        check_environment(env(colour=1))
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the library verifiers 0\.1\. Install it: pip"):
        check_environment(env())


def test_other_version_is_refused(monkeypatch):
    other = ModuleType("verifiers")
    other.__spec__ = SimpleNamespace(name="verifiers")
    monkeypatch.setitem(sys.modules, "verifiers", other)
    with pytest.raises(ValueError, match=r"needs the library verifiers 0\.1\. Install it: pip"):
        check_environment(env())


def test_score_without_metrics():
    environment = make(env())
    environment._environment = SimpleNamespace(rubric=SimpleNamespace(score_rollout=_nothing, cleanup=_nothing))
    assert asyncio.run(environment._score_rollout({"error": None, "reward": 1, "metrics": None})) == Score(1.0)
    assert json.dumps(env().verifiers.args) == "{}"


async def _nothing(state) -> None:
    pass
