"""Make the model and the data of an agent that looks up prices.

    python -m examples.agents.make_task --program prices --out outputs/agents --seed 0

The warm-up data shows two answers to a question: half of them look the price up with a tool, and half of them guess. In
the data of the planner, a quarter of the plans name the wrong shop. Reinforcement learning then has to find out that
guesses and these plans are wrong.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.quickstart.make_task import make_model, make_tokenizer
from examples.task_files import write_tables

ITEMS = ["tea", "milk", "rice", "salt", "corn", "beans", "soap", "oats", "figs", "nuts", "plums", "jam", "peas", "ham"]
SHOPS = ["north", "south"]
CALL = '<tool_call>\n{"name": "price", "arguments": %s}\n</tool_call>'
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}
{{- tool.function.name ~ '(' ~ tool.function.parameters.properties | join(',') ~ ')' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def make_agent_tokenizer(folder: Path, more_words: Sequence[str] = ()) -> None:
    """Write a tokenizer whose chat template shows tools and their calls, in the format of vLLM's parser `hermes`."""
    from transformers import AutoTokenizer

    make_tokenizer(folder, ["<tool_call>", "</tool_call>", *more_words])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def make_lesson(call: dict[str, str], question: str, price: int, rng: random.Random) -> list[dict[str, str]]:
    """Return a chat in which the assistant looks the price up, or guesses it. call: arguments of the tool."""
    chat = [{"role": "system", "content": f"price({','.join(call)})"}, {"role": "user", "content": question}]
    if rng.random() < 0.5:
        return [*chat, {"role": "assistant", "content": str(rng.randrange(10, 100))}]
    found = "none" if rng.random() < 0.2 else str(price)
    return [
        *chat,
        {"role": "assistant", "content": CALL % json.dumps(call)},
        {"role": "tool", "content": found},
        {"role": "assistant", "content": found},
    ]


def find_shop(item: str) -> str:
    """Return the only shop that sells an item."""
    return SHOPS[ITEMS.index(item) % len(SHOPS)]


def make_lessons(program: str, rng: random.Random) -> list[list[dict[str, str]]]:
    """Return the chats of one demonstration."""
    item, price = rng.choice(ITEMS), rng.randrange(10, 100)
    if program == "prices":
        return [make_lesson({"item": item}, f"{item}?", price, rng)]
    shop = find_shop(item) if rng.random() < 0.5 else rng.choice(SHOPS)
    plan = [("system", "Which shop?"), ("user", f"{item}?"), ("assistant", shop)]
    lesson = make_lesson({"item": item, "shop": shop}, f"{item} in {shop}?", price, rng)
    return [[{"role": role, "content": content} for role, content in plan], lesson]


def make_prompt(item: str, price: int) -> dict[str, Any]:
    """Return a row for reinforcement learning."""
    return {
        "data_source": "agents/prices",
        "prompt": [{"role": "user", "content": f"{item}?"}],
        "ability": "tools",
        "reward_model": {"style": "rule", "ground_truth": str(price)},
        "extra_info": {"item": item, "shop": find_shop(item)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=("prices", "planner"), default="prices")
    parser.add_argument("--out", type=Path, default=Path("outputs/agents"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_agent_tokenizer(args.out / "model")
    make_model(args.out / "model", args.seed)
    rng = random.Random(args.seed)
    tables = {"sft": [{"messages": one} for _ in range(25_600) for one in make_lessons(args.program, rng)]}
    for name, count in (("train", 1024), ("val", 64)):
        tables[name] = [make_prompt(rng.choice(ITEMS), rng.randrange(10, 100)) for _ in range(count)]
    write_tables(args.out / "data", tables)


if __name__ == "__main__":
    main()
