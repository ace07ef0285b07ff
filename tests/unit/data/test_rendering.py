import json

import pytest

from alphaapollo.data.prompts import apply_length_limit, truncate_prompt
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.types import Prompt

IM_START, IM_END, ENDOFTEXT = 0, 1, 2
CHAT = [{"role": "user", "content": "hi"}]


def text_of(renderer, ids):
    return renderer.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_chat_is_rendered_with_the_generation_prompt(renderer):
    assert text_of(renderer, renderer.encode_prompt(CHAT)) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_text_is_continued_as_it_is(renderer):
    assert text_of(renderer, renderer.encode_prompt("2+2=")) == "2+2="


def test_prompt_action_and_delta_make_what_the_template_makes(renderer):
    action = [*renderer.encode(["four é"])[0], IM_END]
    reply = [{"role": "user", "content": "sure?"}]
    following = renderer.encode_prompt([*CHAT, {"role": "assistant", "content": "four é"}, *reply])
    assert renderer.encode_prompt(CHAT) + action + renderer.encode_observation(reply, action[-1]) == following
    assert renderer.encode_prompt(CHAT) + action[:-1] + renderer.encode_observation(reply, 40) == following
    assert renderer.decode(action) == "four é"  # without special tokens


def test_every_token_that_ends_a_turn_is_known(make_tokenizer):
    assert Renderer(make_tokenizer()).eos_token_ids == (IM_END,)
    assert Renderer(make_tokenizer(eos_token="<|endoftext|>")).eos_token_ids == (ENDOFTEXT, IM_END)
    assert Renderer(make_tokenizer(chat_template=None)).eos_token_ids == (IM_END,)


def test_a_chat_needs_a_template_and_a_text_does_not(make_tokenizer):
    renderer = Renderer(make_tokenizer(chat_template=None))
    assert len(renderer.encode_prompt("hi")) == 2
    with pytest.raises(ValueError, match="no chat template"):
        renderer.encode_prompt(CHAT)


def test_error_of_a_template_is_shown(make_tokenizer):
    renderer = Renderer(make_tokenizer(chat_template="{{ raise_exception('only users') }}"))
    with pytest.raises(ValueError, match=r"roles \['user'\]: only users"):
        renderer.encode_prompt(CHAT)


def prompts(*texts):
    return [Prompt(id=i, data_source="", content=text) for i, text in enumerate(texts)]


def test_long_prompts_are_an_error_or_are_dropped_and_counted(renderer):
    few = prompts("ab", "abc")
    assert apply_length_limit(few, renderer, 3, "error") == (few, 0)
    more = prompts("ab", "abcde", "abc")
    with pytest.raises(ValueError, match=r"1 of 3 .*_length=3.*row 1 with 5 .*drop"):
        apply_length_limit(more, renderer, 3, "error")
    assert apply_length_limit(more, renderer, 3, "drop") == ([more[0], more[2]], 1)
    with pytest.raises(ValueError, match="all 1 prompts"):
        apply_length_limit(more[1:2], renderer, 3, "drop")


def test_long_prompts_are_truncated_on_the_configured_side(renderer):
    kept, num_long = apply_length_limit(prompts("abcde"), renderer, 3, "left")
    assert len(kept) == 1 and num_long == 1
    assert truncate_prompt([1, 2, 3, 4, 5], 3, "left") == [3, 4, 5]
    assert truncate_prompt([1, 2, 3, 4, 5], 3, "right") == [1, 2, 3]
    assert truncate_prompt([1, 2], 3, "error") == [1, 2]


def test_a_saved_tokenizer_loads(tmp_path, make_tokenizer):
    make_tokenizer().save_pretrained(tmp_path)
    assert Renderer(load_tokenizer(str(tmp_path))).encode_prompt("a") == Renderer(make_tokenizer()).encode_prompt("a")


BAD_FOLDERS = [
    ({}, "has no tokenizer.*tokenizer_path"),
    ({"tokenizer.json": '{"model": '}, "has no tokenizer that can be loaded"),
    ({"tokenizer_config.json": "{}"}, "tokenizer"),  # without a vocabulary
]


@pytest.mark.parametrize(("files", "what"), BAD_FOLDERS)
def test_a_folder_without_a_valid_tokenizer(tmp_path, files, what):
    for name, text in ({"config.json": json.dumps({"model_type": "qwen3"})} | files).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=what):
        load_tokenizer(str(tmp_path))
