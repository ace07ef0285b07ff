"""Stops, prompts, observations and the tokens and masks of twelve chats are those of the library `renderers`, which has
its own code for each family, or differ as written here."""

import copy
from importlib import import_module

import pytest
from transformers import PreTrainedTokenizerFast

from alphaapollo.data.chats import read_chat
from alphaapollo.data.examples import tokenize_examples
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.turns import split_chat
from tests.families import FAMILIES, THINK, Family
from tests.family_folders import make_family_tokenizer
from tests.unit.data.rows import text_of

library = pytest.importorskip("renderers.base")
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
ROLES = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_call_argument_begin|>")
KIMI = Family("Kimi K2", (*ROLES, *SECTION, "[EOS]", "<|im_end|>"), "<|im_end|>", " ".join(THINK), (), "", THINK)
BY_NAME = {family.name: family for family in (*FAMILIES, KIMI)}
CLASSES = {
    "Qwen3": "qwen3.Qwen3Renderer",
    "Qwen3.5": "qwen35.Qwen35Renderer",
    "Nemotron 3": "nemotron3.Nemotron3Renderer",
    "DeepSeek-V3": "deepseek_v3.DeepSeekV3Renderer",
    "DeepSeek-R1": "deepseek_r1.DeepSeekR1Renderer",
    "Llama 3.1 / 3.2": "llama_3.Llama3Renderer",
    "GLM-4.5": "glm45.GLM45Renderer",
    "gpt-oss": "gpt_oss.GptOssRenderer",
    "Kimi K2": "kimi_k2.KimiK2Renderer",
}
USER, TOOL = {"role": "user", "content": "?"}, {"role": "tool", "content": "3", "name": "f"}


def load_library_renderer(name, tokenizer):
    module, _, class_name = CLASSES[name].partition(".")
    return getattr(import_module(f"renderers.{module}"), class_name)(tokenizer)


def keep(prompt, answer, thoughts):
    """The library drops thoughts that the template does not show. Here they are trained on."""
    dropped = thoughts and thoughts not in answer
    return prompt, f"<think>\n{thoughts}\n</think>\n\n{answer}" if dropped else answer


def move_prefill(prompt, answer, thoughts):
    """The library trains on `<think>`, which the generation prompt prefills, so that a model never writes it."""
    return prompt + "<think>\n", answer.removeprefix("<think>").removeprefix("\n")


def open_thoughts(prompt, answer, thoughts):
    """The library trains on answers to a prompt without `<think>`, which no inference shows, and drops the thoughts."""
    return prompt + "<think>\n", f"{thoughts}\n</think>\n\n{answer}"


def start_after_role(prompt, answer, thoughts):
    """The library puts a newline into the prompt that the generation prompt does not have, and ends with EOS."""
    return prompt.removesuffix("\n"), "\n" + answer.replace("<|endoftext|>", "<|user|>")


CONVERSIONS = {  # (prompt, answer, thoughts) of the library -> prompt and answer here
    "Qwen3": keep,
    "Qwen3.5": move_prefill,
    "Nemotron 3": move_prefill,
    "DeepSeek-V3": keep,
    "DeepSeek-R1": open_thoughts,
    "Llama 3.1 / 3.2": keep,
    "GLM-4.5": start_after_role,
    "Kimi K2": keep,
}
ASK, ASK_MORE = {"role": "user", "content": "2+2=?"}, {"role": "user", "content": "and 3+3?"}
FOUR, SIX = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "six"}
SYSTEM, RESULT = {"role": "system", "content": "Be kind."}, {"role": "tool", "content": "3"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]


def call(*numbers, **more):
    calls = [{"function": {"name": "add", "arguments": {"a": number}}} for number in numbers]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


CHATS = {
    "plain": [ASK, FOUR],
    "system": [SYSTEM, ASK, FOUR],
    "empty system": [SYSTEM | {"content": ""}, ASK, FOUR],
    "two turns": [ASK, FOUR, ASK_MORE, SIX],
    "three turns": [SYSTEM, ASK, FOUR, ASK_MORE, SIX, ASK, FOUR],
    "thoughts": [ASK, FOUR | {"reasoning_content": "two and two"}],
    "thoughts in two turns": [ASK, FOUR | {"reasoning": "two, two"}, ASK_MORE, SIX | {"thinking": "three, three"}],
    "call": [ASK, call(1)],
    "result and answer": [ASK, call(1), RESULT, FOUR],
    "parallel calls": [ASK, call(1, 2), RESULT, RESULT, FOUR],
    "text and call": [ASK, call(1, content="Let me add."), RESULT, FOUR],
    "thoughts, call and answer": [ASK, call(1, reasoning_content="add it"), RESULT, FOUR | {"reasoning": "so four"}],
}
UNSUPPORTED = [("Llama 3.1 / 3.2", "parallel calls"), ("Llama 3.1 / 3.2", "text and call")]  # by the template


class LibraryTokenizer(PreTrainedTokenizerFast):
    """Tokenizer whose chat template is a renderer of the library."""

    def apply_chat_template(self, chat, tokenize=False, add_generation_prompt=False, tools=None):
        chat = [dict(one) for one in chat]
        ids = self.library.render_ids(chat, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module", params=CONVERSIONS)
def name_and_renderer(request):
    family = BY_NAME[request.param]
    tokenizer = copy.deepcopy(make_family_tokenizer(family))
    tokenizer.__class__, tokenizer.eos_token = LibraryTokenizer, family.trained_end
    tokenizer.library = load_library_renderer(family.name, tokenizer)
    return family.name, Renderer(tokenizer)


@pytest.mark.parametrize("chat_name", CHATS)
def test_turns_are_those_of_the_library(name_and_renderer, chat_name):
    name, renderer = name_and_renderer
    chat = read_chat(CHATS[chat_name], "messages")
    tools = TOOLS if any("tool_calls" in message for message in chat) else None
    own = renderer.with_arguments({"tools": tools} if tools else {})
    if (name, chat_name) in UNSUPPORTED:
        with pytest.raises(ValueError, match="chat template"):
            split_chat(chat, own)
        return
    for turn in [index for index, message in enumerate(chat) if message["role"] == "assistant"]:
        mask = [index == turn for index in range(turn + 1)]
        sample = library.build_training_sample(
            renderer.tokenizer.library, chat[: turn + 1], tools=tools, message_loss_mask=mask, ensure_final_stop=True
        )
        trained = [index for index, one in enumerate(sample.loss_mask) if one]
        texts = sample.token_ids[: trained[0]], sample.token_ids[trained[0] : trained[-1] + 1]
        prompt, answer = (text_of(renderer, ids) for ids in texts)
        ((*_, row),) = [tokenize_examples(split_chat(chat[: turn + 1], own, last_turn_only=True), own)]
        start = row.response_start
        found = text_of(renderer, row.token_ids[:start]), text_of(renderer, row.token_ids[start:])
        assert found == CONVERSIONS[name](prompt, answer, chat[turn].get("reasoning_content", ""))
        assert sum(row.action_mask) == len(row.token_ids) - start
