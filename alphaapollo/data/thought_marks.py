"""Find the marks of thoughts that the text of an answer lacks, because they are in its prompt or special tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from alphaapollo.data.chats import add_thoughts
from alphaapollo.types import ChatMessage, Message
from alphaapollo.utils.thoughts import PAIRS, SPECIAL_TOKENS, Marks, split_open_mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MARKS = ("<think>", "</think>")
THOUGHT = "\u2063thought\u2063"  # replaces a thought in a chat that is rendered
MARK = r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])"
MAX_MARK = 16  # tokens


class MarkFinder:
    """Finder of the marks of one model.

    Args:
        render: renders a chat with the chat template, without generation prompt; raises ValueError if it cannot.
        skips_special_tokens: whether the texts of answers lack special tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        render: Callable[[Sequence[ChatMessage], bool], str],
        skips_special_tokens: bool,
    ):
        self.pair = find_template_marks(render) if tokenizer.chat_template else DEFAULT_MARKS
        self._new_names = {} if self.pair[0] in PAIRS else dict(zip(self.pair, DEFAULT_MARKS, strict=True))
        self._pattern = re.compile("|".join(map(re.escape, self._new_names)) or "(?!)")  # (?!) matches nothing
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        marks = {*PAIRS, *PAIRS.values(), *self.pair}
        marks |= {*filter(SPECIAL_TOKENS.fullmatch, special.values())} if "<|channel|>" in special.values() else set()
        self._ids = {number for number, mark in special.items() if skips_special_tokens and mark in marks}
        self._skips_special_tokens = skips_special_tokens

    def find(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Marks:
        """Return the marks that the text of an answer lacks. Marks of this chat template become DEFAULT_MARKS."""
        end = self._decode(list(prompt_ids[-MAX_MARK:])).rstrip()
        names = (name for mark, name in self._new_names.items() if end.endswith(mark))
        opened = split_open_mark(end)[1] or next(names, "")
        return [*([(0, opened)] if opened else []), *self._find_in_answer(token_ids)]

    def _find_in_answer(self, token_ids: Sequence[int]) -> Iterator[tuple[int, str]]:
        position = 0
        if not (self._ids or self._new_names):
            return
        for is_mark, run in groupby(token_ids, self._ids.__contains__):
            text = self._decode([*run], skip_special_tokens=self._skips_special_tokens and not is_mark)
            if is_mark:
                yield position, self._new_names.get(text, text)
                continue
            for found in self._pattern.finditer(text):  # the thought includes the template's marks
                name = self._new_names[found[0]]
                yield position + (found.start() if name == DEFAULT_MARKS[0] else found.end()), name
            position += len(text)


def find_template_marks(render: Callable[[Sequence[ChatMessage], bool], str]) -> tuple[str, str]:
    """Return the marks around thoughts in a chat template; DEFAULT_MARKS if it shows no thoughts."""
    thinking = add_thoughts(Message(role="assistant", content="!"), THOUGHT)
    try:
        before, _, after = render([Message(role="user", content="?"), thinking], False).partition(THOUGHT)
    except ValueError:  # the template rejects this chat
        return DEFAULT_MARKS
    opening, closing = re.search(rf"({MARK})\s*\Z", before), re.match(rf"\s*({MARK})", after)
    if known := split_open_mark(before)[1]:
        return (known, PAIRS[known]) if known in PAIRS else DEFAULT_MARKS
    return (opening[1], closing[1]) if opening and closing else DEFAULT_MARKS
