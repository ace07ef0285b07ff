"""Turns of sixteen model families: stops, tokens trained after an answer, appended observations, tools, thoughts."""

import pytest

from alphaapollo.data.examples import tokenize_examples
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.data.turns import split_chat
from tests.families import FAMILIES
from tests.unit.data.rows import text_of, trained
from tests.unit.tool_templates import schema

USER, TOOL = {"role": "user", "content": "?"}, {"role": "tool", "content": "3", "name": "f"}
BY_NAME = {family.name: family for family in FAMILIES}
WITH_TOOLS = [family.name for family in FAMILIES if family.calls is not None]


@pytest.fixture(params=FAMILIES, ids=BY_NAME)
def family_and_renderer(request, family_tokenizers):
    return request.param, Renderer(family_tokenizers[request.param.name])


def ids_of(renderer, *tokens):
    return renderer.tokenizer.convert_tokens_to_ids(list(tokens))


def test_stops_and_thoughts(family_and_renderer):
    family, renderer = family_and_renderer
    assert {*renderer.eos_token_ids} == {*ids_of(renderer, *family.stops)}
    assert all(token in renderer.describe_stops() for token in family.stops)
    assert renderer.rewrites_history == family.rewrites_history


def test_one_end_is_trained_after_an_answer(family_and_renderer):
    family, renderer = family_and_renderer
    chat = [USER, {"role": "assistant", "content": "Bern"}, USER, {"role": "assistant", "content": "Rome"}]
    rows = tokenize_examples(split_chat(chat, renderer), renderer)
    texts = [text for row in rows for text in trained(renderer, row)]
    for answer, text in zip(("Bern", "Rome"), texts, strict=True):
        assert text.endswith(answer + family.trained_end)
        ids = renderer.encode([text])[0]
        assert [token in renderer.eos_token_ids for token in ids] == [False] * (len(ids) - 1) + [True]
        assert renderer.decode(ids[-5:]) == answer


def test_an_observation_does_not_repeat_the_end(family_and_renderer):
    family, renderer = family_and_renderer
    (end,) = ids_of(renderer, family.trained_end)
    assert text_of(renderer, renderer.encode_observation([USER], end)) == family.after
    truncated = text_of(renderer, renderer.encode_observation([USER], renderer.encode(["n"])[0][0]))
    assert truncated.endswith(family.after) and len(truncated) > len(family.after)
    for stop in {*renderer.eos_token_ids} - {end}:  # the sampled stop takes the place of the template's
        shown = text_of(renderer, renderer.encode_observation([USER], stop))
        assert shown == (truncated if family.name == "GLM-4.5" else family.after)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools(family_tokenizers, name):
    family, renderer = BY_NAME[name], ToolRenderer(family_tokenizers[name], [schema("f", a="integer")])
    assert renderer.render_call("f", {"a": 1}) == family.calls
    renderer.check_template_shows_tools(in_append_context=True)
    sampled = {"gpt-oss": "<|call|>", "GLM-4.5": "<|observation|>"}.get(name, family.trained_end)
    assert text_of(renderer, renderer.encode_observation([TOOL], ids_of(renderer, sampled)[0])) == family.result
