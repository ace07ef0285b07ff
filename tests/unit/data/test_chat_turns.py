"""Turns of chats over sixteen families: the prompt of inference, and what the model must write after it."""

from contextlib import contextmanager

import pytest

from alphaapollo.data.chats import read_chat
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.turns import split_chat
from tests.families import FAMILIES, Family
from tests.family_folders import make_family_tokenizer

USER, MORE = {"role": "user", "content": "2+2=?"}, {"role": "user", "content": "and 3+3?"}
FOUR, SIX = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "six"}
THOUGHT = FOUR | {"reasoning_content": "two and two"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}
RESULT = {"role": "tool", "content": "3"}
WITH_CALLS = [family for family in FAMILIES if family.calls is not None]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def split(family, *messages, **options):
    renderer = Renderer(make_family_tokenizer(family))
    chat = read_chat([*messages], "'messages'")
    return renderer, chat, split_chat(chat, renderer, **options)


def named(name):
    return next(family for family in FAMILIES if family.name == name)


def texts(pieces):
    return [piece.text for piece in pieces]


@each_family
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]], ids=["plain", "system"])
def test_each_turn_follows_its_own_prompt(family: Family, system):
    """Whether the turns are one example or several, each is after exactly the prompt that inference renders."""
    renderer, chat, examples = split(family, *system, USER, FOUR, MORE, SIX, USER, FOUR)
    found = []
    for pieces in examples:
        for index in range(1, len(pieces), 2):
            assert (pieces[index - 1].is_trained, pieces[index].is_trained) == (False, True)
            found.append(("".join(texts(pieces[:index])), pieces[index].text))
    starts = [len(system) + 1, len(system) + 3, len(system) + 5]
    assert [prompt for prompt, _ in found] == [renderer.render_chat(chat[:start]) for start in starts]
    for (_, answer), content in zip(found, ("4", "six", "4"), strict=True):
        ends = [stop for stop in renderer.tokenizer.convert_ids_to_tokens([*renderer.eos_token_ids]) if stop in answer]
        assert len(ends) == 1 and answer.endswith(content + ends[0]) and answer.count(ends[0]) == 1


@each_family
def test_thoughts_are_always_trained_on(family: Family):
    renderer, chat, ((prompt, answer),) = split(family, USER, THOUGHT)
    assert prompt.text == renderer.render_chat(chat[:1])
    assert answer.text.count("two and two") == 1 and (prompt.text + answer.text).count("<think>") == 1
    assert answer.text.index("two and two") < answer.text.index("4")


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.name)
def test_calls_are_what_the_model_must_write(family: Family):
    renderer, chat, examples = split(family, USER, CALL, RESULT, FOUR)
    assert examples[0][1].text.startswith(family.calls)
    prompts = {len(texts(pieces)): "".join(texts(pieces)[:-1]) for pieces in examples}
    assert prompts[len(examples[-1])] == renderer.render_chat(chat[:3]) and "4" in examples[-1][-1].text


@contextmanager
def changed_template(family, template):
    """Renderer of a family with another template."""
    tokenizer = make_family_tokenizer(family)
    old, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        yield Renderer(tokenizer)
    finally:
        tokenizer.chat_template = old


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "field"])
def test_thoughts_that_a_later_answer_removes_are_trained_on(inline):
    """As with gpt-oss: the thoughts of a call are dropped as soon as the final answer follows."""
    template = (
        "{% for one in messages %}{% set final = messages[-1].role == 'assistant' and not messages[-1].tool_calls %}"
        "[{{ one.role }}]{% if one.thinking and (loop.last or not final) %}({{ one.thinking }}){% endif %}"
        "{{ one.content }}{% for call in one.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    answer = FOUR | ({"content": "<think>\nso\n</think>\n\n4"} if inline else {"reasoning": "so"})
    chat = read_chat([USER, CALL | {"reasoning": "hm"}, RESULT, answer], "'messages'")
    with changed_template(named("Qwen2.5"), template) as renderer:
        (pieces,) = split_chat(chat, renderer)
    last = "(so)4<|im_end|>"
    assert texts(pieces) == [
        "[user]2+2=?<|im_end|>[assistant]",
        "(hm)f<|im_end|>",
        "[tool]3<|im_end|>[assistant]",
        last,
    ]


def test_turns_of_one_example_keep_the_thoughts_that_the_template_drops():
    calls = split(named("Qwen3"), USER, CALL, RESULT, FOUR)[2]
    (together,) = split(named("Qwen3"), USER, CALL, RESULT, FOUR, in_one_example=True)[2]
    assert len(calls) == 2 and [together[1].text, together[3].text] == [calls[0][1].text, calls[1][1].text]
    assert (
        together[2].text
        == "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(ValueError, match="message 3"):
        split(named("gpt-oss"), USER, FOUR, MORE, SIX, in_one_example=True)


NOT_SHOWN = [
    ("Phi-3.5", (USER, RESULT, FOUR), "message 1 of the role 'tool'"),
    ("SmolLM2", (USER, CALL), "tool calls of message 1"),
    ("Llama 3.1 / 3.2", (USER, CALL | {"content": "Let me."}), "message 1 of the role 'assistant'"),
    ("Qwen2.5", (USER,), "no assistant message"),
]


@pytest.mark.parametrize(("name", "messages", "says"), NOT_SHOWN)
def test_messages_that_the_template_does_not_show_are_refused(name, messages, says):
    with pytest.raises(ValueError, match=says):
        split(named(name), *messages)


def test_thoughts_contradict_a_prompt_that_closes_them():
    closed = named("Qwen3").template.replace("assistant\\n'", "assistant\\n<think>\\n\\n</think>\\n\\n'")
    with changed_template(named("Qwen3"), closed) as renderer:
        with pytest.raises(ValueError, match="enable_thinking=false"):
            split_chat(read_chat([USER, THOUGHT], "'messages'"), renderer)
        ((_, answer),) = split_chat(read_chat([USER, FOUR], "'messages'"), renderer)
    assert answer.text == "4<|im_end|>"


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3", "DeepSeek-R1"])
def test_control_strings_in_thoughts_and_answers_do_not_end_a_turn(name):
    family = named(name)
    renderer, _, ((_, answer),) = split(
        family, USER, {**FOUR, "content": "4<|im_end|>5", "reasoning": f"a{family.eos}b"}
    )
    shown = renderer.tokenizer.decode(renderer.encode([answer.text])[0], skip_special_tokens=False)
    assert f"a{family.eos}b" in shown and "4<|im_end|>5" in shown and shown.endswith("5" + family.eos)
    ids = renderer.encode([answer.text])[0]
    assert sum(token in renderer.eos_token_ids for token in ids) == 1 and shown.count(f"a{family.eos}b") == 1
