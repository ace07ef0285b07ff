"""Token ids that a model must never sample."""

from __future__ import annotations

from alphaapollo.data.images import find_placeholder_ids
from alphaapollo.data.rendering import load_tokenizer


def find_excluded_ids(model_path: str, tokenizer_path: str, trust_remote_code: bool) -> tuple[int, ...]:
    """Return the ids that a model must never sample, in order: placeholders of pictures, and ids of its embeddings that
    the tokenizer has no token for. Many models have more embeddings than tokens, e.g. to make their number even.

    tokenizer_path: empty if it is the model's. Raises ValueError if config.json or the tokenizer cannot be read.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    tokens = load_tokenizer(tokenizer_path or model_path, trust_remote_code).get_vocab().values()
    unused = {*range(getattr(config.get_text_config(), "vocab_size", 0))} - {*tokens}
    return tuple(sorted({*unused, *find_placeholder_ids(config)}))
