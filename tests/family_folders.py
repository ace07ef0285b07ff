"""Folders with the tokenizer and the generation_config.json of a model family."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.families import DEEPSEEK_BOS, Family

BOS = ("<s>", "<bos>", "<BOS_TOKEN>", "<|begin_of_text|>", DEEPSEEK_BOS, "<|startoftext|>")


@cache
def make_family_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a family: one token per byte, then its special and its other added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in family.special])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.added])
    bos = next((token for token in BOS if token in family.special), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token=bos, chat_template=family.template
    )


def save_family(family: Family, folder: Path) -> Path:
    """Write a family's tokenizer and generation_config.json to a folder."""
    tokenizer = make_family_tokenizer(family)
    tokenizer.save_pretrained(folder)
    if family.generation_ends:
        ids = tokenizer.convert_tokens_to_ids(list(family.generation_ends))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "temperature": 0.6}))
    return folder
