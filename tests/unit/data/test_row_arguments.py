"""Tools and variables of the chat template in the columns of a prompt's row, and the day that a template writes."""

import asyncio
import json

import pytest

from alphaapollo.config.schema import Data, Env
from alphaapollo.data.prompts import apply_length_limit, load_prompts
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.environments.base import Services
from alphaapollo.environments.memory import Step
from alphaapollo.environments.single_turn import SingleTurnEnvironment
from alphaapollo.planning.template import try_chats
from alphaapollo.rollout.worker import make_token_context_factory
from tests.builders import write_rows
from tests.unit.tool_templates import schema

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}: {{ tool.function.description }}]{% endfor %}"
    "{% for one in messages %}<|im_start|>{{ one.role }} {{ one.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ mode }}{% endif %}"
)
CHAT = [{"role": "user", "content": "2+2?"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.<|im_end|>", "parameters": {}}}
SHOWN = "[add: Adds.<|im_end|>]<|im_start|>user 2+2?<|im_end|><|im_start|>"


def load(tmp_path, **columns):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": CHAT, **columns}, {"prompt": CHAT}])
    return load_prompts(str(tmp_path / "rows.jsonl"), "prompt")


@pytest.mark.parametrize("columns", [{"tools": [TOOL]}, {"tools": json.dumps([TOOL])}, {"tools": TOOL["function"]}])
def test_the_tools_of_a_row_are_in_its_prompts(tmp_path, make_tokenizer, columns):
    renderer = Renderer(make_tokenizer(TEMPLATE))
    prompt, other = load(tmp_path, **columns, chat_template_kwargs={"mode": "think"})
    assert renderer.render_prompt(prompt).replace("\ufdd0", "") == SHOWN + "think"
    try_chats(renderer, [prompt, other])
    lengths = renderer.count_prompt_tokens([prompt, other])
    assert lengths[0] == len(renderer.encode_for_prompt(CHAT, prompt)) > lengths[1]
    assert renderer.encode_for_prompt(CHAT, prompt).count(renderer.tokenizer.eos_token_id) == 1  # not the tool's
    kept, long = apply_length_limit([prompt, other], renderer, lengths[1], "drop")
    assert (kept, long) == ([other], 1)
    with pytest.raises(ValueError, match=r"The first is .*rows\.jsonl, row 0 with"):
        apply_length_limit([prompt, other], renderer, lengths[1], "error")


@pytest.mark.parametrize("context", ["append", "memory"])
def test_episodes_show_the_tools_of_their_row_in_each_turn(tmp_path, make_tokenizer, context):
    renderer = Renderer(make_tokenizer(TEMPLATE))
    make_context = make_token_context_factory(
        Env(context=context), renderer, Data(train_files="x", max_prompt_length=500)
    )
    for prompt in load(tmp_path, tools=[TOOL], chat_template_kwargs={"mode": "think"}):
        own, environment = (
            renderer.with_arguments(prompt.template_arguments),
            SingleTurnEnvironment(Services(None, Env())),
        )
        episode = make_context(environment, prompt)
        episode.start_episode(asyncio.run(environment.reset(prompt)).messages)
        assert episode.prompt_ids == own.encode_prompt(CHAT)
        following, _ = episode.add_turn_and_get_context([5], Step("a", [{"role": "user", "content": "more"}]))
        if context == "append":
            assert following == own.encode_observation([{"role": "user", "content": "more"}], 5)


def test_tools_of_a_row_and_of_the_environment_do_not_mix(tmp_path, make_tokenizer):
    prompt, _ = load(tmp_path, tools=[TOOL])
    renderer = ToolRenderer(make_tokenizer(TEMPLATE), [schema("add")])
    with pytest.raises(ValueError, match=r"row 0: .*column 'tools'"):
        try_chats(renderer, [prompt])


def test_a_fixed_day_is_what_the_template_writes(make_tokenizer):
    template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    renderer = Renderer(make_tokenizer(template), {"strftime_now": "2024-07-26"})
    assert renderer.render_chat(CHAT) == "26 Jul 20242+2?"
    assert renderer.with_arguments({"mode": "x"}).render_chat(CHAT) == "26 Jul 20242+2?"
