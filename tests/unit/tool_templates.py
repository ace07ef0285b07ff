"""Small tokenizers with chat templates that call tools like real models."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from alphaapollo.data.vocabulary import load_tokenizer
from examples.quickstart.make_task import make_tokenizer

TAGS = ("<tool_call>", "</tool_call>")
# As Qwen2.5 and Hermes: JSON in tags, consecutive results in one turn.
HERMES = r"""
{%- if tools %}{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- else %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}
    {%- for call in message.tool_calls or [] %}
      {%- if not loop.first or message.content %}{{ '\n' }}{% endif %}
      {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
ONE_CALL = HERMES.replace(
    "{%- for call", "{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call!') }}{% endif %}{%- for call"
)
_ANSWER = "message.role ~ '\\n' ~ message.content"
THOUGHTLESS = HERMES.replace(_ANSWER, "message.role ~ '\\n' ~ message.content.split('</think>')[-1]")
# As Qwen3: thoughts before the last question are dropped, those since then stay.
FORGETFUL = HERMES.replace(
    _ANSWER,
    "message.role ~ '\\n' ~ (message.content.split('</think>')[-1] "
    "if 'user' in (messages[loop.index:] | map(attribute='role') | list) else message.content)",
)
# As Mistral: special tokens, ids of nine characters, results only after calls.
MISTRAL = """{%- if tools -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' and not messages[loop.index0 - 1].tool_calls -%}
{{ raise_exception('a result without a call') }}{%- endif -%}
{%- if message.tool_call_id | length != 9 -%}{{ raise_exception('bad id') }}{%- endif -%}
[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif message.tool_calls -%}[TOOL_CALLS][
{%- for call in message.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif -%}{%- endfor -%}]<|im_end|>
{%- else -%}{{ message.content }}<|im_end|>{%- endif -%}
{%- endfor -%}"""
MISTRAL_TOKENS = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
# How transformers describes the calls of HERMES.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def tokenizer_of(
    template: str = HERMES, special: Sequence[str] = (), words: Sequence[str] = TAGS
) -> PreTrainedTokenizerBase:
    """Bytes as tokens, `words` as one token each, `special` ones besides."""
    tokenizer = copy.deepcopy(_tokenizer(tuple(special), tuple(words)))
    tokenizer.chat_template = template
    return tokenizer


@cache
def _tokenizer(special: tuple[str, ...], words: tuple[str, ...]) -> PreTrainedTokenizerBase:
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder), words)
        tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def schema(name: str, **types: str) -> dict[str, Any]:
    """Schema of a tool, e.g. `schema("add", a="integer")`."""
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": f"{name}!", "parameters": parameters}}


def call(name: str, **arguments: Any) -> str:
    """A call in the format of HERMES."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
