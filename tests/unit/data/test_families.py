"""Turns of sixteen model families: stops, tokens trained after an answer, appended observations, tools, thoughts."""

from itertools import groupby
from pathlib import Path

import pytest

from alphaapollo.data.chats import split_chat
from alphaapollo.data.examples import tokenize_examples
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.data.tool_rendering import ToolRenderer
from tests.families import FAMILIES, Family
from tests.family_folders import save_family
from tests.unit.tool_templates import schema

QUESTION = {"role": "user", "content": "?"}
WITH_TOOLS = [family for family in FAMILIES if family.calls is not None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {family.name: save_family(family, tmp_path_factory.mktemp("family")) for family in FAMILIES}


def each(families):
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)


def text_of(renderer, ids):
    return renderer.tokenizer.decode(ids, skip_special_tokens=False)


def ids_of(renderer, *tokens):
    return renderer.tokenizer.convert_tokens_to_ids(list(tokens))


@each(FAMILIES)
def test_stops(folders, family: Family):
    renderer = Renderer(load_tokenizer(str(folders[family.name])))
    assert {*renderer.eos_token_ids} == {*ids_of(renderer, *family.stops)}
    assert all(token in renderer.describe_stops() for token in family.stops)


def trained_texts(renderer, chat) -> list[str]:
    """Texts that SFT trains: one per assistant message."""
    texts = []
    for row in tokenize_examples(split_chat(chat, renderer), renderer):
        pairs = groupby(zip(row.action_mask, row.token_ids, strict=True), key=lambda pair: pair[0])
        texts += [text_of(renderer, [token for _, token in pairs]) for is_trained, pairs in pairs if is_trained]
    return texts


@each(FAMILIES)
def test_one_end_is_trained_after_an_answer(folders, family: Family):
    renderer = Renderer(load_tokenizer(str(folders[family.name])))
    chat = [QUESTION, {"role": "assistant", "content": "Bern"}, QUESTION, {"role": "assistant", "content": "Rome"}]
    texts = trained_texts(renderer, chat)
    for answer, text in zip(("Bern", "Rome"), texts, strict=True):
        assert text.endswith(answer + family.trained_end)
        ids = renderer.encode([text])[0]
        assert [token in renderer.eos_token_ids for token in ids] == [False] * (len(ids) - 1) + [True]
        assert renderer.decode(ids[-5:]) == answer


@each(FAMILIES)
def test_an_observation_does_not_repeat_the_end(folders, family: Family):
    renderer = Renderer(load_tokenizer(str(folders[family.name])))
    (end,) = ids_of(renderer, family.trained_end)
    assert text_of(renderer, renderer.encode_observation([QUESTION], end)) == family.after
    truncated = text_of(renderer, renderer.encode_observation([QUESTION], renderer.encode(["n"])[0][0]))
    assert truncated.endswith(family.after) and len(truncated) > len(family.after)
    for stop in {*renderer.eos_token_ids} - {end}:  # the sampled stop takes the place of the template's
        shown = text_of(renderer, renderer.encode_observation([QUESTION], stop))
        assert shown == (truncated if family.name == "GLM-4.5" else family.after)


@each(WITH_TOOLS)
def test_tools(folders, family: Family):
    renderer = ToolRenderer(load_tokenizer(str(folders[family.name])), [schema("f", a="integer")])
    assert renderer.render_call("f", {"a": 1}) == family.calls
    renderer.check_template_shows_tools(in_append_context=True)
    sampled = {"gpt-oss": "<|call|>", "GLM-4.5": "<|observation|>"}.get(family.name, family.trained_end)
    result = [{"role": "tool", "content": "3", "name": "f"}]
    assert text_of(renderer, renderer.encode_observation(result, ids_of(renderer, sampled)[0])) == family.result


@each(FAMILIES)
def test_thoughts(folders, family: Family):
    assert Renderer(load_tokenizer(str(folders[family.name]))).rewrites_history == family.rewrites_history
