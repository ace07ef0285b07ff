"""Stop tokens of generation_config.json, and turn ends that are texts."""

import json
from contextlib import nullcontext

import pytest

from alphaapollo.data.examples import make_text_pieces, tokenize_examples
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.turns import split_chat
from alphaapollo.data.vocabulary import find_generation_config, find_stop_ids, read_end_token_ids
from tests.unit.data.conftest import CHATML

REPLY = [{"role": "user", "content": "?"}]


ENDS = [
    ('{"eos_token_id": [1, 2], "temperature": 0.5}', [1, 2]),
    ('{"eos_token_id": 2}', [2]),
    ('{"eos_token_id": null}', []),
    ('{"top_k": 4}', []),
    *((damaged, None) for damaged in ("{", "[1]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}')),
]


@pytest.mark.parametrize(("content", "ids"), ENDS)
def test_ends_of_a_generation_config(tmp_path, content, ids):
    """A damaged file is an error, and a model without the file has no ends."""
    (tmp_path / "generation_config.json").write_text(content)
    with nullcontext() if ids is not None else pytest.raises(ValueError, match=r"generation_config\.json"):
        assert read_end_token_ids(str(tmp_path)) == ids
    for path in ("", str(tmp_path / "missing"), "absent/model"):
        assert find_generation_config(path) is None
        assert read_end_token_ids(path) == []


def test_files_of_tokenizer_and_model_are_read(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(chat_template=None)
    for name, ids in (("tokenizer", 0), ("model", [2, 100_000])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer.name_or_path = str(tmp_path / "tokenizer")
    assert Renderer(tokenizer).eos_token_ids == (1, 0)
    assert Renderer(tokenizer, model_path=str(tmp_path / "model")).eos_token_ids == (1, 0, 2)  # without unknown ids


@pytest.mark.parametrize("end", ["###\n", "<|done|>", "\n\n", "\n", ""])
def test_a_stop_token_is_trained_after_an_end_that_is_text(make_tokenizer, end):
    renderer = Renderer(make_tokenizer(CHATML.replace("<|im_end|>\n", end), eos_token="<|endoftext|>"))
    assert renderer.eos_token_ids == (2,)
    assert len(renderer.list_end_notices()) == bool(end)
    answer = {"role": "assistant", "content": "4"}
    ((_, trained),) = split_chat([*REPLY, answer], renderer)
    assert trained.text == f"4{end}<|endoftext|>"
    assert renderer.decode_raw(renderer.turn_end_ids) == f"{end}<|endoftext|>"
    following = renderer.encode_observation(REPLY, 40)
    if end:
        ((*_, context, _),) = split_chat([*REPLY, answer, *REPLY, answer], renderer)
        assert renderer.encode([context.text]) == [following[len(end) :]]  # as in an episode
    assert renderer.tokenizer.decode(following).startswith(end)
    assert renderer.encode_observation(REPLY, 2) == following[len(end) :]  # a turn has one end


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n"])
def test_an_end_in_the_answer_is_trained_once(make_tokenizer, end):
    renderer = Renderer(make_tokenizer())
    ((_, trained),) = split_chat([*REPLY, {"role": "assistant", "content": f"4{end}"}], renderer)
    assert trained.text == "4<|im_end|>"
    (row,) = tokenize_examples([make_text_pieces("?", "4<|im_end|>")], renderer)
    assert list(row.token_ids).count(1) == 1


def test_stop_strings_that_are_special_tokens(make_tokenizer):
    assert find_stop_ids(make_tokenizer(), ["###", "<|im_end|>", "<|endoftext|>"]) == (1, 2)


def test_text_before_the_end_is_trained_and_not_repeated(make_tokenizer):
    renderer = Renderer(make_tokenizer(CHATML.replace("<|im_end|>", " <|im_end|>")))
    assert renderer.eos_token_ids == (1,)
    assert renderer.encode_observation(REPLY, 40)[1] == 1
    assert renderer.encode_observation(REPLY, 1) == renderer.encode_observation(REPLY, 40)[2:]
    assert renderer.append_turn_end([40, 1]) == [40, 1, renderer.turn_end_ids[-1]]
