"""Token ids that a model must never sample."""

from __future__ import annotations

from alphaapollo.config.schema import Model
from alphaapollo.data.images import find_placeholder_ids
from alphaapollo.data.rendering import load_tokenizer
from alphaapollo.models.load import load_config


def find_excluded_ids(model: Model) -> tuple[int, ...]:
    """Return the ids that a model must never sample, in order: placeholders of pictures, and ids of its embeddings that
    the tokenizer has no token for. Many models have more embeddings than tokens, e.g. to make their number even.

    Raises ValueError if config.json or the tokenizer cannot be read.
    """
    config = load_config(model)
    tokens = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code).get_vocab().values()
    unused = {*range(getattr(config.get_text_config(), "vocab_size", 0))} - {*tokens}
    return tuple(sorted({*unused, *find_placeholder_ids(config)}))
