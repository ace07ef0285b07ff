import pytest

from alphaapollo.data.tool_rendering import ToolRenderer
from tests.unit.tool_templates import (
    FORGETFUL,
    HERMES,
    MISTRAL,
    MISTRAL_TOKENS,
    ONE_CALL,
    THOUGHTLESS,
    schema,
    tokenizer_of,
)

ADD = schema("add", a="integer", note="string")
USER = {"role": "user", "content": "1+2?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "x"}}\n</tool_call>'
FIRST = {"role": "tool", "content": "3", "name": "add"}
SECOND = {"role": "tool", "content": "<b>", "name": "add"}


@pytest.fixture
def renderer():
    return ToolRenderer(tokenizer_of(), [ADD])


def text_of(renderer, ids):
    return renderer.tokenizer.decode(ids, skip_special_tokens=False)


def calling(*calls, content=""):
    made = [{"type": "function", "id": "call00000", "function": call} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def test_the_prompt_shows_the_tools(renderer):
    shown = text_of(renderer, renderer.encode_prompt([USER]))
    assert '"name": "add"' in shown and shown.endswith("1+2?<|im_end|>\n<|im_start|>assistant\n")


def test_prompt_calls_and_delta_make_what_the_template_makes(renderer):
    action = [*renderer.encode([f"so\n{CALL}\n{CALL}"])[0], renderer.eos_token_ids[0]]
    delta = renderer.encode_observation([FIRST, SECOND], action[-1])
    assert renderer.encode_observation([FIRST, SECOND], last_sampled_token=40) == [action[-1], *delta]
    function = {"name": "add", "arguments": {"a": 1, "note": "x"}}
    chat = [USER, calling(function, function, content="so"), FIRST, SECOND]
    text = renderer.tokenizer.apply_chat_template(chat, tools=[ADD], tokenize=False, add_generation_prompt=True)
    assert text_of(renderer, renderer.encode_prompt([USER]) + action + delta) == text


def test_decoding_keeps_special_tokens_of_calls():
    renderer = ToolRenderer(tokenizer_of(MISTRAL, MISTRAL_TOKENS), [ADD])
    ids = renderer.encode(['[TOOL_CALLS][{"name": "add"}]'])[0]
    assert renderer.decode([*ids, renderer.eos_token_ids[0]]) == '[TOOL_CALLS][{"name": "add"}]'
    assert renderer.decode([]) == ""


def test_a_template_with_special_tokens_and_call_ids():
    renderer = ToolRenderer(tokenizer_of(MISTRAL, MISTRAL_TOKENS), [ADD])
    renderer.check_template_shows_tools(in_append_context=True)
    delta = renderer.encode_observation([FIRST, SECOND], last_sampled_token=renderer.eos_token_ids[0])
    assert text_of(renderer, delta) == (
        '[TOOL_RESULTS]{"content": "3", "call_id": "call00000"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "<b>", "call_id": "call00001"}[/TOOL_RESULTS]'
    )
    assert renderer.call_prefix == "[TOOL_CALLS]"
    # without append context, a fresh prompt shows what the model wrote as plain text
    with pytest.raises(ValueError, match="a result without a call"):
        renderer.check_template_shows_tools(in_append_context=False)


def test_rendered_call(renderer):
    assert renderer.example_call == ("add", {"a": 1, "note": "x"})
    assert renderer.render_call(*renderer.example_call) == CALL
    assert renderer.call_prefix == "<tool_call>"


def test_one_call_a_turn_is_known(renderer):
    assert renderer.supports_parallel_calls
    assert not ToolRenderer(tokenizer_of(ONE_CALL), [ADD]).supports_parallel_calls


def test_thoughts_that_only_later_questions_remove_stay_between_calls():
    renderer = ToolRenderer(tokenizer_of(FORGETFUL), [ADD])
    assert not renderer.rewrites_history
    assert ToolRenderer(tokenizer_of(THOUGHTLESS), [ADD]).rewrites_history


BROKEN_TEMPLATES = [
    ("tool | tojson", "''", "does not show the tools add"),
    ("message.content ~ '\\n</tool_response>'", "'!'", "does not show .* calls"),
    ("call.function.arguments | tojson", "''", "does not show .* calls"),
    ("{%- endfor %}\n    {{- '<|im_end|>\\n' }}", "{%- endfor %}", "the end of the turn"),
    ("call.function.arguments | tojson", "call.function.missing.more", "rejects a chat"),
]


@pytest.mark.parametrize(("old", "new", "says"), BROKEN_TEMPLATES)
def test_a_template_that_cannot_do_it_is_refused(old, new, says):
    template = HERMES.replace(old, new)
    assert template != HERMES
    with pytest.raises(ValueError, match=says):
        ToolRenderer(tokenizer_of(template), [ADD]).check_template_shows_tools(in_append_context=True)


def test_arguments_are_text_and_contents_none_if_the_template_needs_it():
    """As the templates of DeepSeek V3 and R1 do."""
    call = "{% if message.tool_calls and message.content is none %}{{ message.tool_calls[0].function.arguments + '!' }}"
    template = "{% for message in messages %}" + call + "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    function = {"name": "add", "arguments": {"a": "ü"}}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert ToolRenderer(tokenizer_of(template), [ADD]).render_chat([message]) == ""
    shows_name = template.replace("function.arguments +", "function.name + message.tool_calls[0].function.arguments +")
    assert ToolRenderer(tokenizer_of(shows_name), [ADD]).render_chat([message]) == 'add{"a": "ü"}!'
