# ruff: noqa: E501, RUF001, RUF005
"""Special tokens, flags, generation_config.json and chat formats of sixteen model families, over a vocabulary of bytes.

The templates are short ones of our own, which write the format that each family documents.
"""

from __future__ import annotations

from dataclasses import dataclass

THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Family:
    """A family's format, and what is expected of it: texts of tokens, as decoded with special tokens."""

    name: str
    special: tuple[str, ...]  # flagged as special; others are added tokens without the flag
    eos: str
    template: str
    stops: tuple[str, ...]
    after: str  # what follows an answer that sampled its end, if the user writes "?"
    added: tuple[str, ...] = ()
    generation_ends: tuple[str, ...] = ()  # eos_token_id of generation_config.json; empty: no file
    end: str | None = None  # token that SFT trains after an answer; None: EOS
    calls: str | None = None  # the call f(a=1) without its end; None: the template shows no tools
    result: str = ""  # what follows a sampled call, if the result is "3"
    rewrites_history: bool = False

    @property
    def trained_end(self) -> str:
        return self.end or self.eos


def _chatml(assistant: str, before: str = "", generation: str = "", tool: str = "") -> str:
    """Return a ChatML template. assistant: body of an assistant message; tool: a message of role tool."""
    result = tool or (
        "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        "{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    )
    return (
        before + "{%- for message in messages %}{%- if message.role == 'tool' %}" + result + "{%- else %}"
        "{{- '<|im_start|>' ~ message.role ~ '\\n' }}"
        "{%- if message.role == 'assistant' %}" + assistant + "{%- else %}{{- message.content }}{%- endif %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n" + generation + "' }}{%- endif %}"
    )


LAST_QUESTION = (
    "{%- set last = namespace(question=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}"
)
# Thoughts before the last question are dropped, and an empty thought is shown since then.
THOUGHTS = (
    "{%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- set thought = (message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') "
    "if '</think>' in message.content else '') %}"
)
TOOLS_SYSTEM = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{%- for tool in tools %}{{- '\\n' ~ tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
)
JSON_CALLS = (
    "{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' ~ call.function.arguments | tojson }}'
    "{{- '}\\n</tool_call>' }}{%- endfor %}"
)
XML_CALLS = (
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}"
    "{%- for name, value in call.function.arguments.items() %}"
    "{{- '<parameter=' ~ name ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}{%- endfor %}"
)
JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
CHATML_AFTER = "\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
CHATML_RESULT = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"

LLAMA = (
    "{{- '<|begin_of_text|>' }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ tools | tojson }}"
    "{{- '<|eot_id|>' }}{%- endif %}{%- for message in messages %}"
    "{{- '<|start_header_id|>' ~ ('ipython' if message.role == 'tool' else message.role) ~ '<|end_header_id|>\\n\\n' }}"
    "{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    "{{- '{\"name\": \"' ~ call.name ~ '\", \"parameters\": ' ~ call.arguments | tojson ~ '}' }}"
    "{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
LLAMA_AFTER = "<|start_header_id|>user<|end_header_id|>\n\n?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA_31_TOKENS = (*LLAMA_TOKENS, "<|eom_id|>", "<|python_tag|>")

DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_ADDED = (
    *("<｜User｜>", "<｜Assistant｜>", *DEEPSEEK_CALLS, "<｜tool▁calls▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
)
DEEPSEEK_BOS, DEEPSEEK_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def _deepseek(content: str, generation: str = "", tools: str = "") -> str:
    return (
        "{{- '<｜begin▁of▁sentence｜>' }}" + ("{{- tools | tojson if tools else '' }}" if tools else "") + "{%- for "
        "message in messages %}{%- if message.role == 'user' %}{{- '<｜User｜>' ~ message.content }}"
        "{%- elif message.role == 'assistant' %}{{- '<｜Assistant｜>' ~ (" + content + ") }}" + tools + ""
        "{{- '<｜end▁of▁sentence｜>' }}"
        "{%- elif message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' }}"
        "{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<｜Assistant｜>" + generation + "' }}{%- endif %}"
    )


FAMILIES = (
    Family(
        "Qwen2.5",
        CHATML_TOKENS,
        "<|im_end|>",
        _chatml("{{- message.content }}" + JSON_CALLS, TOOLS_SYSTEM),
        ("<|im_end|>", "<|endoftext|>"),
        CHATML_AFTER,
        CALL,
        ("<|im_end|>", "<|endoftext|>"),
        calls=JSON_CALL,
        result=CHATML_RESULT,
    ),
    Family(
        "Qwen3",
        CHATML_TOKENS,
        "<|im_end|>",
        _chatml(
            THOUGHTS + "{%- if loop.index0 > last.question and (loop.last or thought) %}"
            "{{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{%- endif %}{{- text }}" + JSON_CALLS,
            TOOLS_SYSTEM + LAST_QUESTION,
        ),
        ("<|im_end|>", "<|endoftext|>"),
        CHATML_AFTER,
        (*CALL, *THINK),
        ("<|im_end|>", "<|endoftext|>"),
        calls="<think>\n\n</think>\n\n" + JSON_CALL,
        result=CHATML_RESULT,
        rewrites_history=True,
    ),
    Family(
        "Qwen3.5",
        (*CHATML_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        "<|im_end|>",
        _chatml(
            THOUGHTS + "{%- if loop.index0 > last.question %}"
            "{{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{%- endif %}{{- text }}" + XML_CALLS,
            TOOLS_SYSTEM + LAST_QUESTION,
            "<think>\\n",
        ),
        ("<|im_end|>", "<|endoftext|>"),
        CHATML_AFTER + "<think>\n",
        (*CALL, *THINK),
        ("<|im_end|>", "<|endoftext|>"),
        calls="\n</think>\n\n" + XML_CALL,
        result=CHATML_RESULT + "<think>\n",
        rewrites_history=True,
    ),
    Family(
        "Nemotron 3",
        ("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        _chatml(
            THOUGHTS
            + "{%- if loop.index0 > last.question and thought %}{{- '<think>\\n' ~ thought ~ '\\n</think>\\n' }}"
            "{{- text }}{%- else %}{{- '<think></think>' ~ message.content.split('</think>')[-1] }}{%- endif %}"
            + XML_CALLS,
            "{%- if not tools and messages[0].role != 'system' %}{{- '<|im_start|>system\\n<|im_end|>\\n' }}{%- endif %}"
            + TOOLS_SYSTEM
            + LAST_QUESTION,
            "<think>\\n",
        ).replace("</tool_response>'", "</tool_response>\\n'"),
        ("<|im_end|>", "</s>"),
        CHATML_AFTER + "<think>\n",
        (*CALL, *THINK),
        ("</s>", "<|im_end|>"),
        calls="</think>" + XML_CALL,
        result=CHATML_RESULT.replace("</tool_response>", "</tool_response>\n") + "<think>\n",
        rewrites_history=True,
    ),
    Family(
        "SmolLM2",
        CHATML_TOKENS,
        "<|im_end|>",
        _chatml(
            "{{- message.content }}",
            "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{%- endif %}",
        ),
        ("<|im_end|>",),
        CHATML_AFTER,
        generation_ends=("<|im_end|>",),
    ),
    Family(
        "LFM2",
        ("<|startoftext|>", *CHATML_TOKENS, "<|tool_call_start|>", "<|tool_call_end|>"),
        "<|im_end|>",
        _chatml(
            "{{- message.content }}{%- for call in message.tool_calls or [] %}"
            "{{- '<|tool_call_start|>[' ~ call.function.name ~ '(' }}{%- for name, value in call.function.arguments.items() %}"
            "{{- name ~ '=' ~ value }}{%- endfor %}{{- ')]<|tool_call_end|>' }}{%- endfor %}",
            "{{- '<|startoftext|>' }}" + TOOLS_SYSTEM,
            tool="{{- '<|im_start|>tool\\n' ~ message.content ~ '<|im_end|>\\n' }}",
        ),
        ("<|im_end|>",),
        CHATML_AFTER,
        generation_ends=("<|im_end|>",),
        calls="<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
        result="\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n",
    ),
    Family(
        "DeepSeek-V3",
        (DEEPSEEK_BOS, DEEPSEEK_EOS),
        DEEPSEEK_EOS,
        _deepseek(
            "message.content",
            tools="{%- for call in message.tool_calls or [] %}{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
            "<｜tool▁sep｜>' ~ call.function.name ~ '\\n' ~ call.function.arguments | tojson ~ '<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>' }}{%- endfor %}",
        ),
        (DEEPSEEK_EOS,),
        "<｜User｜>?<｜Assistant｜>",
        DEEPSEEK_ADDED,
        (DEEPSEEK_EOS,),
        calls="".join([*DEEPSEEK_CALLS[:2], "function", DEEPSEEK_CALLS[2], 'f\n{"a": 1}', DEEPSEEK_CALLS[3]])
        + "<｜tool▁calls▁end｜>",
        result="<｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜Assistant｜>",
    ),
    Family(
        "DeepSeek-R1",
        (DEEPSEEK_BOS, DEEPSEEK_EOS),
        DEEPSEEK_EOS,
        _deepseek("message.content.split('</think>')[-1]", "<think>\\n"),
        (DEEPSEEK_EOS,),
        "<｜User｜>?<｜Assistant｜><think>\n",
        (*DEEPSEEK_ADDED, *THINK),
        (DEEPSEEK_EOS,),
        rewrites_history=True,
    ),
    Family(
        "Llama 3 base with the Llama 3 template",
        LLAMA_TOKENS,
        "<|end_of_text|>",
        LLAMA,
        ("<|end_of_text|>", "<|eot_id|>"),
        LLAMA_AFTER,
        generation_ends=("<|end_of_text|>",),
        end="<|eot_id|>",
    ),
    Family(
        "Llama 3.1 / 3.2",
        LLAMA_31_TOKENS,
        "<|eot_id|>",
        LLAMA,
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        LLAMA_AFTER,
        generation_ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        calls='{"name": "f", "parameters": {"a": 1}}',
        result=LLAMA_AFTER.replace("user", "ipython").replace("?", "3"),
    ),
    Family(
        "Phi-3.5",
        ("<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        "<|endoftext|>",
        "{%- for message in messages %}{%- if message.role in ('system', 'user', 'assistant') %}"
        "{{- '<|' ~ message.role ~ '|>\\n' ~ message.content ~ '<|end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}",
        ("<|endoftext|>", "<|end|>", "<|assistant|>"),
        "\n<|user|>\n?<|end|>\n<|assistant|>\n",
        generation_ends=("<|end|>", "<|assistant|>", "<|endoftext|>"),
        end="<|end|>",
    ),
    Family(
        "Gemma 2 / 3",
        ("<pad>", "<eos>", "<bos>"),
        "<eos>",
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}"
        "{{- message.content | trim ~ '<end_of_turn>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}",
        ("<eos>", "<end_of_turn>"),
        "\n<start_of_turn>user\n?<end_of_turn>\n<start_of_turn>model\n",
        ("<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
    ),
    Family(
        "GLM-4.5",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
        LAST_QUESTION + "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' ~ tools | tojson }}{%- endif %}"
        "{%- for message in messages %}{%- if message.role == 'assistant' %}" + THOUGHTS + "{{- '<|assistant|>' }}"
        "{{- '\\n<think>' ~ (thought.strip() if loop.index0 > last.question else '') ~ '</think>' }}"
        "{%- if text.strip() %}{{- '\\n' ~ text.strip() }}{%- endif %}"
        "{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' ~ call.function.name ~ '\\n' }}"
        "{%- for name, value in call.function.arguments.items() %}{{- '<arg_key>' ~ name ~ '</arg_key>\\n' }}"
        "{{- '<arg_value>' ~ value ~ '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"
        "{%- elif message.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}"
        "{%- endif %}{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}"
        "{%- else %}{{- '<|' ~ message.role ~ '|>\\n' ~ message.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "\n?<|assistant|>",
        (*THINK, *CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        end="<|user|>",
        calls="\n<think></think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        result="\n<tool_response>\n3\n</tool_response><|assistant|>",
        rewrites_history=True,
    ),
    Family(
        "gpt-oss",
        (
            "<|endoftext|>",
            "<|return|>",
            "<|constrain|>",
            "<|channel|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|call|>",
        ),
        "<|return|>",
        "{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{%- if tools %}"
        "{{- '<|start|>developer<|message|>' ~ tools | tojson ~ '<|end|>' }}{%- endif %}{%- for message in messages %}"
        "{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
        "{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}"
        "{{- call.arguments | tojson ~ '<|call|>' }}"
        "{%- elif message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content }}"
        "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{%- elif message.role == 'tool' %}{{- '<|start|>functions.' ~ message.name ~ ' to=assistant<|channel|>commentary' }}"
        "{{- '<|message|>' ~ message.content | tojson ~ '<|end|>' }}"
        "{%- else %}{{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        "<|start|>user<|message|>?<|end|><|start|>assistant",
        generation_ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        calls=' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        result='<|start|>functions.f to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant',
        rewrites_history=True,
    ),
    Family(
        "Mistral",
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
        + ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        "</s>",
        "{{- bos_token }}{%- if tools %}{{- '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}"
        "{%- for message in messages %}{%- if message.tool_calls %}{{- '[TOOL_CALLS][' }}"
        "{%- for call in message.tool_calls %}{{- ', ' if not loop.first else '' }}"
        '{{- \'{"name": "\' ~ call.function.name ~ \'", "arguments": \' ~ call.function.arguments | tojson ~ \', "id": "\' }}'
        "{{- call.id ~ '\"}' }}{%- endfor %}{{- ']</s>' }}"
        "{%- elif message.role == 'assistant' %}{{- ' ' ~ message.content ~ '</s>' }}"
        "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]{\"content\": ' ~ message.content ~ '}[/TOOL_RESULTS]' }}"
        "{%- else %}{{- '[INST] ' ~ message.content ~ '[/INST]' }}{%- endif %}{%- endfor %}",
        ("</s>",),
        "[INST] ?[/INST]",
        generation_ends=("</s>",),
        calls='[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "call00000"}]',
        result='[TOOL_RESULTS]{"content": 3}[/TOOL_RESULTS]',
        rewrites_history=True,
    ),
    Family(
        "Cohere Command R",
        ("<PAD>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
        + ("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
        "{{- bos_token }}{%- for message in messages %}"
        "{%- set name = {'user': 'USER', 'assistant': 'CHATBOT'}.get(message.role, 'SYSTEM') %}"
        "{{- '<|START_OF_TURN_TOKEN|><|' ~ name ~ '_TOKEN|>' ~ message.content | trim ~ '<|END_OF_TURN_TOKEN|>' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}",
        ("<|END_OF_TURN_TOKEN|>",),
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        generation_ends=("<|END_OF_TURN_TOKEN|>",),
    ),
)
