"""Texts with which layers are scaled: the prompts of a data file, or a text file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alphaapollo.config.schema import Model
from alphaapollo.data.prompts import load_prompts
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.utils.hub import expand_home

MAX_PROMPTS, NUM_TEXTS, LENGTH = 512, 32, 256


def read_prompts(file: str, source: Model) -> Tensor:
    """Return up to NUM_TEXTS texts of LENGTH tokens from a file: a text file (.txt), or up to MAX_PROMPTS prompts of
    data as `data.train_files` names them, with the chat template of `source`. Prompts and texts are spread evenly over
    the file. Raises ValueError if the file cannot be read, or is too short."""
    renderer = Renderer(load_tokenizer(source.path, source.trust_remote_code))
    if file.endswith(".txt"):
        contents: list[Any] = [_read_text(file)]
    else:
        contents = [prompt.content for prompt in load_prompts(file, "prompt", renderer=renderer)]
    contents = contents[:: -(-len(contents) // MAX_PROMPTS)]
    tokens = [token for content in contents for token in renderer.encode_prompt(content)]
    if len(tokens) < LENGTH:
        fix = "Use a file with a few hundred prompts."
        raise ValueError(f"--prompts={file} has {len(tokens)} tokens, fewer than {LENGTH}. {fix}")
    texts = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    return texts[:: -(-len(texts) // NUM_TEXTS)]


def _read_text(file: str) -> str:
    try:
        return expand_home(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts={file} cannot be read: {error}. Use a text file in UTF-8.") from error
