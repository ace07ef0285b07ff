"""Twelve chats of eight families give the tokens and masks of the library `renderers`, or differ as written here.

The library's renderer of a family takes the place of its chat template, over a vocabulary of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alphaapollo.data.chats import read_chat, split_chat
from alphaapollo.data.examples import tokenize_examples
from alphaapollo.data.rendering import Renderer
from tests.families import CALL, CHATML_TOKENS, DEEPSEEK_ADDED, DEEPSEEK_BOS, DEEPSEEK_EOS, LLAMA_31_TOKENS, THINK

library = pytest.importorskip("renderers.base")
TAGS = (*THINK, *CALL, "<tool_response>", "</tool_response>")
OUTPUTS = tuple(token.replace("output", "outputs") for token in DEEPSEEK_ADDED[-2:])
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|user|>")
KIMI_CALLS = [f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_end")]
KIMI = [
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    *KIMI_CALLS,
    "<|tool_call_argument_begin|>",
]


def keep(prompt: str, answer: str, thoughts: str) -> tuple[str, str]:
    """The library drops thoughts that the template does not show. Here they are trained on."""
    dropped = thoughts and thoughts not in answer
    return prompt, f"<think>\n{thoughts}\n</think>\n\n{answer}" if dropped else answer


def move_prefill(prompt: str, answer: str, thoughts: str) -> tuple[str, str]:
    """The library trains on `<think>`, which the generation prompt prefills, so that a model never writes it."""
    return prompt + "<think>\n", answer.removeprefix("<think>").removeprefix("\n")


def open_thoughts(prompt: str, answer: str, thoughts: str) -> tuple[str, str]:
    """The library trains on answers to a prompt without `<think>`, which no inference shows, and drops the thoughts."""
    return prompt + "<think>\n", f"{thoughts}\n</think>\n\n{answer}"


def start_after_role(prompt: str, answer: str, thoughts: str) -> tuple[str, str]:
    """The library puts a newline into the prompt that the generation prompt does not have, and ends with EOS."""
    return prompt.removesuffix("\n"), "\n" + answer.replace("<|endoftext|>", "<|user|>")


@dataclass(frozen=True)
class Case:
    name: str  # of the library
    special: tuple[str, ...]
    convert: Callable[[str, str, str], tuple[str, str]]  # (prompt, answer, thoughts) of the library -> ours
    unsupported: tuple[str, ...] = ()  # chats that the template cannot show: they are refused


CASES = (
    Case("qwen3", (*CHATML_TOKENS, *TAGS), keep),
    Case("qwen3.5", (*CHATML_TOKENS, *TAGS, *VISION), move_prefill),
    Case("nemotron-3", (*CHATML_TOKENS, *TAGS), move_prefill),
    Case("deepseek-v3", (DEEPSEEK_BOS, *DEEPSEEK_ADDED, *OUTPUTS, *THINK, DEEPSEEK_EOS), keep),
    Case("deepseek-r1", (DEEPSEEK_BOS, *DEEPSEEK_ADDED, *OUTPUTS, *THINK, DEEPSEEK_EOS), open_thoughts),
    Case("llama-3", (*LLAMA_31_TOKENS, "<|eot_id|>"), keep, ("parallel calls", "text and call")),
    Case("glm-4.5", (*TAGS, *ARGUMENTS, *GLM), start_after_role),
    Case("kimi-k2", (*KIMI, *THINK, "[EOS]", "<|im_end|>"), keep),
)

ASK, ASK_MORE = {"role": "user", "content": "2+2=?"}, {"role": "user", "content": "and 3+3?"}
FOUR, SIX = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "six"}
SYSTEM = {"role": "system", "content": "Be kind."}
TOOL = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def call(*numbers, **more):
    calls = [{"function": {"name": "add", "arguments": {"a": number}}} for number in numbers]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


RESULT = {"role": "tool", "content": "3"}
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


class LibraryTokenizer(PreTrainedTokenizerFast):
    """Tokenizer whose chat template is a renderer of the library."""

    def apply_chat_template(self, chat, tokenize=False, add_generation_prompt=False, tools=None):
        ids = self.library.render_ids(
            [dict(one) for one in chat], tools=tools, add_generation_prompt=add_generation_prompt
        )
        return self.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case_and_renderer(request):
    case: Case = request.param
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tags = {*TAGS, *ARGUMENTS}
    tokenizer.add_tokens([AddedToken(one, special=one not in tags, normalized=False) for one in case.special])
    end = next(one for one in ("<|im_end|>", case.special[-1]) if one in case.special)
    made = LibraryTokenizer(tokenizer_object=tokenizer, eos_token=end, chat_template=" ".join(tags))
    config = next(
        one
        for one in vars(pytest.importorskip("renderers.configs")).values()
        if getattr(getattr(one, "model_fields", {}).get("name"), "default", None) == case.name
    )
    made.library = library.create_renderer(made, config())
    return case, Renderer(made)


@pytest.mark.parametrize("name", CHATS)
def test_turns_are_those_of_the_library(case_and_renderer, name):
    case, renderer = case_and_renderer
    chat = read_chat(CHATS[name], "messages")
    tools = [{"type": "function", "function": TOOL}] if any("tool_calls" in message for message in chat) else None
    own = renderer.with_arguments({"tools": tools} if tools else {})
    if name in case.unsupported:
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
        prompt, answer = (renderer.tokenizer.decode(ids, skip_special_tokens=False) for ids in texts)
        ((*_, row),) = [tokenize_examples(split_chat(chat[: turn + 1], own, last_turn_only=True), own)]
        start = row.response_start
        found = [
            renderer.tokenizer.decode(ids, skip_special_tokens=False)
            for ids in (row.token_ids[:start], row.token_ids[start:])
        ]
        assert tuple(found) == case.convert(prompt, answer, chat[turn].get("reasoning_content", ""))
        assert sum(row.action_mask) == len(row.token_ids) - start
