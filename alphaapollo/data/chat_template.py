"""Render a chat with the chat template of a tokenizer. The template is a program, which others may have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from alphaapollo.types import ChatMessage
from alphaapollo.utils.deadline import DeadlineError, limit_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError, MemoryError)
"""Errors that template code may raise in addition to Jinja errors, e.g. by adding a dict to a string."""
MAX_SECONDS, MAX_CHARS = 10, 1 << 28  # of one rendering
_refused_templates = WeakKeyDictionary["PreTrainedTokenizerBase", object]()  # {tokenizer: template over a limit}


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat: Sequence[ChatMessage],
    add_generation_prompt: bool,
    variables: Mapping[str, object],
) -> str:
    """Convert a chat to text. Raises ValueError if the template rejects the chat, or exceeds a limit of time or length,
    after which it is not run again."""
    import jinja2

    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    try:
        if tokenizer.chat_template and tokenizer.chat_template == _refused_templates.get(tokenizer):
            raise DeadlineError(
                f"it ran for more than {MAX_SECONDS} seconds, or wrote more than {MAX_CHARS} characters"
            )
        with limit_seconds(MAX_SECONDS, f"it ran for more than {MAX_SECONDS} seconds"):
            rendered = tokenizer.apply_chat_template(chat, **options, **variables)
        if len(rendered) > MAX_CHARS:
            raise DeadlineError(f"it wrote {len(rendered)} characters")
        rendered.encode()  # raises UnicodeEncodeError for an unpaired surrogate, which has no tokens
    except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
        if isinstance(error, DeadlineError):
            _refused_templates[tokenizer] = tokenizer.chat_template
        roles, reason = [message["role"] for message in chat], str(error) or type(error).__name__
        owner = f" of {tokenizer.name_or_path}" if tokenizer.name_or_path else ""
        raise ValueError(f"the chat template{owner} rejects a chat with the roles {roles}: {reason}") from error
    assert isinstance(rendered, str)
    return rendered
