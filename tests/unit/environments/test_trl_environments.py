"""Environment classes in TRL's GRPOTrainer and here: the same prompts, tool calls, results and rewards.

Both sides play the same texts. Run with TRL 1.16 installed, or unpacked in a folder:

    PYTHONPATH=/folder/with/trl python -m pytest tests/unit/environments/test_trl_environments.py
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.environments import base
from alphaapollo.types import GroupRequest, Prompt, Sampling
from alphaapollo.utils.user_module import load_user_module
from examples.quickstart.make_task import make_model, make_tokenizer
from tests.unit.rollout.worker_kit import generate, make_worker
from tests.unit.tool_templates import call

trl = pytest.importorskip("trl", minversion="1.16", reason="install trl>=1.16, or add its folder to PYTHONPATH")

FILE = '''
from typing import Literal, Optional

LOG = []  # of each episode: goal, and calls with arguments


class Counter:
    def reset(self, goal, prompt, **columns):
        self.goal, self.total, self.calls = goal, 0, [("reset", prompt)]
        LOG.append((goal, self.calls))
        return f" Reach {goal}."

    def subtract(self, x: int | float, times: Optional[int] = 1, *, unit: Literal["one", "ten"] = "one"):
        """Subtract a number
        from the total.

        Args:
            x: The number,
                as an integer.
            times: How often.
            unit: The unit (choices: ["one", "ten"])
        """
        self.calls.append(("subtract", x, times, unit))
        self.total -= x * times * (10 if unit == "ten" else 1)

    def add(self, x: float, notes: list[str] = (), more: dict[str, int] | None = None):
        """Add a number to the total.

        Args:
            x: The number.
            notes: Texts, which have no effect.
            more: Numbers by name, which have no effect.
        """
        self.calls.append(("add", x, notes, more))
        if x > 100:
            raise ValueError(f"{x} is 'too' large")
        self.total += x
        return {"total": self.total, "notes": notes}

    async def look(self):
        """Look at the total."""
        self.calls.append(("look",))
        return f"It is “{self.total}”."

    def get_reward(self):
        self.calls.append(("get_reward",))
        return 1.0 - abs(self.goal - self.total)

    def _helper(self): ...


class Parts(Counter):
    def reset(self, **columns):
        return [{"type": "text", "text": super().reset(**columns)}, {"type": "text", "text": " Now."}]

    def state(self):
        """Show the state."""
        return [{"type": "text", "text": f"total {self.total}"}]


def read_completions(environments, completions, **kwargs):
    for one, completion in zip(environments, completions):
        one.calls.append(completion)
    return [0.0] * len(completions)
'''
EPISODES = [  # texts of the model
    [call("add", x=3), call("add", x=1.5, notes=["a"], more={"b": 1}), "Done."],
    [call("add", x=101), call("missing", x=1), "<think>hm</think>It fails."],
    [f"Two at once.\n{call('add', x=7)}\n{call('subtract', x=2, unit='ten')}", call("look"), "The end."],
    [call("subtract", x=1, times=3), call("add", x=1)[:-14], "This text is not written."],
    ["No call."],
    [call("add", z=1), call("subtract"), call("add", x="a"), call("look", x=None), call("add", x=1, more=None), ""],
    [call("state"), f"{call('look')}\n{call('look')}", call("add", x=5), call("add", x=0), "Five."],
]
GOAL = 5


@dataclass
class Played:
    """An episode: tokens of the prompt and after it, which of these the model sampled, reward, and calls."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    reward: float
    goal: int
    calls: list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _forget_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base._ENVIRONMENTS, "_entries", dict(base._ENVIRONMENTS._entries))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def write_model(folder: Path, template: str) -> None:
    """Write a random model with a chat template of TRL, and the file of the classes."""
    (folder / "classes_of_users.py").write_text(FILE)
    make_tokenizer(folder, ["<tool_call>", "</tool_call>"])
    make_model(folder, seed=0, max_position_embeddings=8192)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    trl.chat_template_utils.add_response_schema(tokenizer).save_pretrained(folder)


def make_row(number: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"Count, {number}."}], "goal": GOAL + number}


def answer(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """The next text of the episode that a prompt belongs to, as tokens."""
    shown = tokenizer.decode(token_ids)
    number, turn = int(re.search(r"Count, (\d+)\.", shown)[1]), shown.count("<|im_start|>assistant") - 1
    return [*tokenizer.encode(EPISODES[number][turn], add_special_tokens=False), tokenizer.eos_token_id]


def play_there(folder: Path, name: str) -> list[Played]:
    """Play EPISODES in a step of TRL's trainer, each as a group of two, with scripted texts instead of samples."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    specification = importlib.util.spec_from_file_location("classes_in_trl", folder / "classes_of_users.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens, rewards = [], []

    class Trainer(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            return [answer(tokenizer, ids) for ids in prompt_ids], None

        def _generate(self, prompts: list[Any]) -> Any:
            result = super()._generate(prompts)
            tokens.extend(zip(*result[:3], strict=True))
            return result

        def _calculate_rewards(self, *inputs: Any) -> Any:
            result = super()._calculate_rewards(*inputs)
            rewards.extend(result.sum(1).tolist())
            return result

    config = trl.GRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        num_generations=2,
        per_device_train_batch_size=2 * len(EPISODES),
        max_completion_length=4000,
        max_steps=1,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([make_row(number) for number in range(len(EPISODES))]),
        environment_factory=getattr(module, name),
        reward_funcs=[module.read_completions],
        args=config,
    ).train()
    log = module.LOG
    return [Played(*three, reward, *one) for three, reward, one in zip(tokens, rewards, log, strict=True)]


def play_here(folder: Path, name: str) -> list[Played]:
    """Play EPISODES in a rollout worker."""
    tokenizer, module = load_tokenizer(str(folder)), load_user_module(str(folder / "classes_of_users.py"), "")
    module.LOG.clear()
    env = Env(env_name=name, custom_module=module.__file__, action_format="chat_template", max_steps=9)
    engine = FakeEngine(len(tokenizer), script=lambda token_ids, _: answer(tokenizer, token_ids))
    worker = make_worker(folder, engine, env, max_prompt_length=4000, max_response_length=4000)
    requests = []
    for number in range(len(EPISODES)):
        row = make_row(number)
        prompt = Prompt(number, "", row["prompt"], None, extra_info={"goal": row["goal"]})
        requests.append(GroupRequest(prompt, 2, Sampling(max_tokens=4000), number))
    played = []
    for group in generate(worker, *requests):
        for one in group.trajectories:
            assert not one.score.outcome.failed, one.score.reason
            (row,) = one.rows
            start = row.response_start
            tokens = [*row.token_ids[:start]], [*row.token_ids[start:]], [*row.action_mask[start:]]
            played.append((tokens, one.score.reward))
    log = sorted(module.LOG, key=lambda one: one[0])
    return [Played(*tokens, reward, *one) for (tokens, reward), one in zip(played, log, strict=True)]


def drop_differences(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs: thoughts, which are in its content here; parts, which are one text here; and the
    name of a tool, which is `unknown` here if there is no such tool."""
    shown = {key: value for key, value in message.items() if key not in ("name", "reasoning_content")}
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {**shown, "content": re.sub("<think>.*</think>", "", text)}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2_5", "Counter"),
        ("qwen3", "Counter"),
        ("qwen3_vl", "Parts"),  # templates of text models do not show parts
    ],
)
def test_prompts_calls_results_and_rewards_are_equal(tmp_path, template, name):
    write_model(tmp_path, template)
    there, here = play_there(tmp_path, name), play_here(tmp_path, name)
    decode = load_tokenizer(str(tmp_path)).decode
    assert len(there) == len(here) == 2 * len(EPISODES)
    for ours, theirs in zip(here, there, strict=True):
        assert decode(ours.prompt) == decode(theirs.prompt) and decode(ours.response) == decode(theirs.response)
        for one in (ours, theirs):
            one.calls.sort(key=lambda call: isinstance(call, list))  # TRL calls get_reward after reward functions
            one.calls[-1] = [*map(drop_differences, one.calls[-1])]
        assert ours == theirs
