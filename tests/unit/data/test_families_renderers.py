"""Token ids of families compared with the library renderers, which has its own code for each family."""

from importlib import import_module

import pytest

from alphaapollo.data.rendering import Renderer, load_tokenizer
from tests.families import FAMILIES
from tests.family_folders import save_family

pytest.importorskip("renderers")

CLASSES = {
    "Qwen3": "qwen3.Qwen3Renderer",
    "Qwen3.5": "qwen35.Qwen35Renderer",
    "Nemotron 3": "nemotron3.Nemotron3Renderer",
    "DeepSeek-V3": "deepseek_v3.DeepSeekV3Renderer",
    "DeepSeek-R1": "deepseek_r1.DeepSeekR1Renderer",
    "Llama 3.1 / 3.2": "llama_3.Llama3Renderer",
    "GLM-4.5": "glm45.GLM45Renderer",
    "gpt-oss": "gpt_oss.GptOssRenderer",
}
MORE_STOPS = {"Nemotron 3": {"</s>"}, "gpt-oss": {"<|endoftext|>"}}  # of generation_config.json
USER, TOOL = {"role": "user", "content": "?"}, {"role": "tool", "content": "3", "name": "f"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyo"}
CHATS = [
    [USER],
    [{"role": "system", "content": "Be short."}, USER],
    [USER, {"role": "assistant", "content": "yo"}, USER],
    [USER, THOUGHT, USER],
    [USER, THOUGHT, USER, THOUGHT, USER],
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Our renderer and the library's, by family."""
    found = {}
    for family in FAMILIES:
        if family.name in CLASSES:
            tokenizer = load_tokenizer(str(save_family(family, tmp_path_factory.mktemp("family"))))
            module, _, name = CLASSES[family.name].partition(".")
            found[family.name] = Renderer(tokenizer), getattr(import_module(f"renderers.{module}"), name)(tokenizer)
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_stops(pairs, name):
    ours, theirs = pairs[name]
    more = {*ours.tokenizer.convert_tokens_to_ids([*MORE_STOPS.get(name, ())])}
    assert {*ours.eos_token_ids} == {*theirs.get_stop_token_ids()} | more


@pytest.mark.parametrize("chat", CHATS, ids=len)
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("gpt-oss", "Llama 3.1 / 3.2")])
def test_prompts(pairs, name, chat):
    """gpt-oss has a tokenizer of its own there; the library's Llama prompts have dates, which our template lacks."""
    ours, theirs = pairs[name]
    assert ours.encode_prompt(chat) == theirs.render_ids(chat, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [("Qwen3", TOOL), ("Qwen3.5", TOOL), ("Nemotron 3", TOOL), ("DeepSeek-V3", USER), ("Llama 3.1 / 3.2", USER)],
)
def test_observations(pairs, name, message):
    """After each stop token, and after a truncated answer."""
    ours, theirs = pairs[name]
    prompt = ours.encode_prompt([USER])
    answer = ours.encode(["so</think>yo" if ours.tokenizer.decode(prompt).endswith("<think>\n") else "yo"])[0]
    for stop in ([], *([one] for one in theirs.get_stop_token_ids())):
        sampled = [*answer, *stop]
        expected = theirs.bridge_to_next_turn(prompt, sampled, [message]).token_ids
        assert [*prompt, *sampled, *ours.encode_observation([message], sampled[-1])] == expected
