"""Run a recipe of tinker-cookbook against a server, in an environment without alphaapollo. Only what needs the hub is
replaced: data sets, and what the cookbook knows about a model by its name.

python tinker_recipes.py sl_loop|rl_loop|sl_basic|rl_basic URL MODEL KEY=VALUE ...
"""

from __future__ import annotations

import importlib
import random
import sys
from types import SimpleNamespace
from typing import Any

import chz  # type: ignore[import-not-found]
import datasets
from tinker_cookbook import model_info  # type: ignore[import-not-found]
from tinker_cookbook.renderers.role_colon import RoleColonRenderer  # type: ignore[import-not-found]

RENDERER = "role_colon"
LOOPS = ("sl_loop", "rl_loop")  # the others have a blueprint of their configuration


def make_sums(count: int) -> list[dict[str, str]]:
    """Rows of gsm8k."""
    chosen = random.Random(0)
    pairs = [(chosen.randrange(5), chosen.randrange(5)) for _ in range(count)]
    return [{"question": f"{x}+{y}=?", "answer": f"#### {x + y}"} for x, y in pairs]


def make_chats(count: int) -> list[dict[str, Any]]:
    """Rows of no_robots."""
    return [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"].removeprefix("#### ")},
            ]
        }
        for row in make_sums(count)
    ]


def read_first_token() -> None:
    """Make the first token of an answer its number. An untrained model writes none, and all its rewards are 0."""
    original = RoleColonRenderer.parse_response

    def parse_response(self: Any, response: list[int]) -> Any:
        message, *rest = original(self, response)
        return message | {"content": f"\\boxed{{{response[0] % 9}}}"}, *rest

    RoleColonRenderer.parse_response = parse_response


def main(recipe: str, url: str, model: str, words: list[str]) -> None:
    def load_dataset(path: str, *_: Any, split: str | None = None, **__: Any) -> Any:
        rows: list[Any] = make_sums(512) if "gsm8k" in path else make_chats(1024)
        made = datasets.Dataset.from_list(rows)
        both = datasets.DatasetDict(train=made, test=made.select(range(16)))
        return both[split] if split else both

    datasets.load_dataset = load_dataset  # before the recipes import it
    read_first_token()
    names = {"organization": "", "version_str": "", "size_str": "0.1B", "recommended_renderers": (RENDERER,)}
    attributes = SimpleNamespace(is_vl=False, is_chat=True, **names)
    model_info.get_recommended_renderer_name = lambda *_, **__: RENDERER
    model_info.get_model_attributes = lambda _: attributes
    module = importlib.import_module(f"tinker_cookbook.recipes.{recipe}")
    given = [f"base_url={url}", f"model_name={model}", *words]
    if recipe in LOOPS:
        module.main(chz.Blueprint(module.Config).make_from_argv(given))
        return
    config = module.build_config_blueprint(model).make_from_argv(given)
    if recipe == "rl_basic":
        config = chz.replace(config, dataset_builder=chz.replace(config.dataset_builder, batch_size=4, group_size=8))
    module.main(config)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
