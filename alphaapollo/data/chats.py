"""Read chats from data rows: names of roles, tool calls, thoughts and weights of messages as people have them.

{"from": "gpt", "value": "4"}                              ->  {"role": "assistant", "content": "4"}
{"from": "function_call", "value": '{"name": "f", ...}'}   ->  {"role": "assistant", "tool_calls": [...]}
{"role": "assistant", "content": "4", "weight": 0}         ->  {"role": "assistant", "content": "4", "train": False}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from alphaapollo.data.image_messages import LOCAL_IMAGES, ImageReader, convert_parts, place_images, read_image_column
from alphaapollo.data.images import ImageTokens
from alphaapollo.types import IMAGE_MARK, EncodedImage, JsonObject, Message, ToolCall
from alphaapollo.utils.literals import drop_none, read_literal

if TYPE_CHECKING:
    from alphaapollo.data.rendering import Renderer


ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "ai", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "tool_result"), "tool"),
}
"""{name of a role in lower case: role}. Other names are given to the chat template as they are."""
CALL_ROLES = ("function_call", "tool_call")  # the content of such a message is one call, or a list of calls
CONTEXT_COLUMNS = ("images", "image", "system", "history", "tools", "chat_template_kwargs", "enable_thinking")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
WEIGHT_KEYS = ("weight", "train", "training", "loss", "loss_scale", "loss_mask", "step_loss_mask", "trainable")
"""Weights of a message in OpenAI's data, axolotl, ShareGPT, ms-swift, verl and slime: 0 or 1."""
MASK_KEYS = ("mask", "masked")  # torchtune's opposite of a weight: true excludes the message
SPAN_KEYS = ("train_detail", "training_detail")  # axolotl's weights of parts of a message
MESSAGE_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name", "images"}
MESSAGE_KEYS |= {*THOUGHT_KEYS, *WEIGHT_KEYS, *MASK_KEYS, *SPAN_KEYS}  # keys of messages that are read


def read_chat(value: Sequence[object], column: str, reader: ImageReader = LOCAL_IMAGES) -> list[Message]:
    """Convert a list of {role, content} or {from, value} in `column` of a data file to messages. Calls and tool results
    without an id get one. Raises ValueError if a message is malformed or all contents are empty."""
    messages: list[Message] = []
    waiting: dict[str, ToolCall] = {}  # calls without a result, by id
    for one in value:
        try:
            message, is_call = _read_message(one, reader)
        except ValueError as error:
            raise ValueError(f"{column} has an invalid message: {error}") from error
        if is_call and messages and messages[-1]["role"] == "assistant":  # ShareGPT: parallel calls follow each other
            earlier = messages.pop()
            message = {**earlier, "tool_calls": [*earlier.get("tool_calls", []), *message["tool_calls"]]}
        if message["role"] == "assistant":
            for number, call in enumerate(message.get("tool_calls", [])):
                call["id"] = call["id"] or f"call{number:05}"  # nine letters and digits, as some templates require
            waiting = {call["id"]: call for call in message.get("tool_calls", [])}
        elif message["role"] == "tool" and waiting:
            given = message.get("tool_call_id", "")
            call = waiting.pop(given if given in waiting else next(iter(waiting)))
            message = {
                **Message(role="", content="", tool_call_id=call["id"], name=call["function"]["name"]),
                **message,
            }
        messages.append(message)
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise ValueError(f"{column} is empty. Fill it or remove the row.")
    return messages


def read_chat_text(text: object) -> list[object] | None:
    """Return the list of messages that a text shows as JSON or in Python's notation; None for another text or value."""
    value: Any = read_literal(text) if isinstance(text, str) and ("content" in text or "value" in text) else None
    keys = ({"role", "content"}, {"from", "value"})
    is_chat = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    return value if is_chat and any(key <= value[0].keys() for key in keys) else None


def read_context(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of the columns `system` and `history` ([[question, answer], ...]), which precede a chat.
    Raises ValueError if a column is malformed."""
    system, history = row.get("system"), _parse(row.get("history")) or []
    if not isinstance(system, str | None):
        raise ValueError(f"'system' is {shorten_repr(system)}; it must be text.")
    if not isinstance(history, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise ValueError(f"'history' is {shorten_repr(history)}; it must be a list of [question, answer] pairs.")
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]
    first = [Message(role="system", content=system)] if system and system.strip() else []
    return [*first, *(read_chat(turns, "'history'") if turns else [])]


def join_context(context: list[Message], chat: list[Message]) -> list[Message]:
    """Put the messages of `read_context` before a chat. Raises ValueError if both have a different system message."""
    systems = [one["content"] for one in (*context[:1], *chat[:1]) if one["role"] == "system"]
    if len({*systems}) > 1:
        raise ValueError(f"the column 'system' and the chat have different system messages, {systems}. Remove one.")
    return [*context, *chat[len(systems[1:]) :]]


def read_template_arguments(row: Mapping[str, Any]) -> JsonObject:
    """Return the variables for the chat template in the columns `chat_template_kwargs`, `tools` and `enable_thinking`.
    Raises ValueError if a column is malformed."""
    arguments = _parse(row.get("chat_template_kwargs")) or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"'chat_template_kwargs' is {shorten_repr(arguments)}; it must be a dict.")
    arguments = drop_none({"enable_thinking": row.get("enable_thinking"), **arguments})
    tools = _parse(row.get("tools")) or []
    schemas = []
    for tool in map(_parse, tools if isinstance(tools, list) else [tools]):
        if not isinstance(tool, dict) or not isinstance(tool.get("function", tool).get("name"), str):
            raise ValueError(f"'tools' has {shorten_repr(tool)}; it must be {{type, function: {{name, parameters}}}}.")
        schemas.append(drop_none(tool if "function" in tool else {"type": "function", "function": tool}))
    return {**arguments, **({"tools": schemas} if schemas else {})}


def read_thoughts(row: Mapping[str, Any]) -> str:
    """Return the text of the first of the keys THOUGHT_KEYS with one; empty without. Raises ValueError for no text."""
    for key in THOUGHT_KEYS:
        if (thoughts := row.get(key)) is not None:
            if not isinstance(thoughts, str):
                raise ValueError(f"{key!r} is {shorten_repr(thoughts)}; it must be text.")
            if thoughts.strip():
                return thoughts
    return ""


def add_thoughts(message: Message, thoughts: str) -> Message:
    """Return an assistant message with thoughts, under the names that chat templates read."""
    return {**message, "reasoning_content": thoughts, "thinking": thoughts} if thoughts else message


def read_inline_thoughts(message: Message) -> str:
    """Return the thoughts that an assistant's content has before `</think>`."""
    before, end, _ = message["content"].partition("</think>" if message["role"] == "assistant" else "\0")
    return before.split("<think>")[-1].strip("\n") if end else ""


def drop_thoughts(message: Message) -> Message:
    """Return a message without the thoughts of the assistant."""
    if message["role"] != "assistant":
        return message
    kept = {key: part for key, part in message.items() if key not in THOUGHT_KEYS}
    return cast(Message, {**kept, "content": message["content"].rpartition("</think>")[2].lstrip("\n")})


def count_equal_items(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def shorten_repr(value: object) -> str:
    """Return the repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_message(value: object, reader: ImageReader) -> tuple[Message, bool]:
    """Convert a message. Also returns whether its role is that of a call (CALL_ROLES)."""
    raw = {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else {}
    name, content = raw.pop("role", raw.pop("from", None)), raw.pop("content", raw.pop("value", None))
    if not isinstance(name, str):
        raise ValueError(f"{shorten_repr(value)}; it must be a {{role, content}} dict.")
    role, is_call = ROLES.get(name.strip().lower(), name), name.strip().lower() in CALL_ROLES
    is_trained = _read_weight(raw)
    calls = _read_calls(content if is_call else raw.pop("tool_calls", raw.pop("function_call", None)))
    if is_call or (content is None and calls):
        content = ""
    elif isinstance(content, dict) and role == "tool":
        content = json.dumps(drop_none(content), ensure_ascii=False)
    elif not isinstance(content, str | list):
        raise ValueError(f"{shorten_repr(value)}; its content must be text or parts.")
    thoughts = read_thoughts(raw)
    if isinstance(content, list):
        kinds = ("thinking", "reasoning")  # the text of such a part is under this key or `text`
        inner = [part for part in content if isinstance(part, dict) and part.get("type") in kinds]
        thoughts = thoughts or "".join(str(part.get(part["type"]) or part.get("text") or "") for part in inner)
        content = [part for part in content if part not in inner]
    rest = {key: part for key, part in raw.items() if key not in THOUGHT_KEYS}
    message = convert_parts({"role": role, "content": content, **rest}, reader)
    if role == "assistant":
        message = add_thoughts({**message, "tool_calls": calls} if calls else message, thoughts)
        message = message if is_trained else {**message, "train": False}
    return message, is_call


def _read_weight(raw: JsonObject) -> bool:
    """Remove the weights from a message and return whether it is trained on. Raises ValueError for other values than 0
    and 1, and for weights of parts of a message."""
    weights = {key: raw.pop(key) for key in (*WEIGHT_KEYS, *MASK_KEYS) if key in raw}
    for key, weight in weights.items():
        if weight not in (0, 1) or (key in MASK_KEYS and not isinstance(weight, bool)):  # mask: 1 has both meanings
            raise ValueError(f"{key}={shorten_repr(weight)} is not supported. Use weight: 1 or 0.")
    if spans := [key for key in SPAN_KEYS if raw.pop(key, None)]:
        raise ValueError(f"{', '.join(spans)} is not supported. Set `train: false` to exclude the complete message.")
    return all(weight != (key in MASK_KEYS) for key, weight in weights.items())


def _read_calls(value: object) -> list[ToolCall]:
    """Convert calls, or the text of calls, to OpenAI's format. Ids that are missing are empty."""
    value = (_parse(value) if isinstance(value, str) else drop_none(value)) or []
    calls = []
    for one in value if isinstance(value, list) else [value]:
        call = _parse(one)
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = _parse(function.get("arguments", function.get("parameters"))) or {}
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError(
                f"the tool call {shorten_repr(one)}; it must be {{name, arguments}} with a dict or its JSON."
            )
        named = {"name": function["name"], "arguments": arguments}
        calls.append(cast(ToolCall, {"id": str(call.get("id", "")), "type": "function", "function": named}))
    return calls


def _parse(value: object) -> Any:
    """Return the value that a text writes in JSON or Python notation; other values unchanged."""
    if not isinstance(value, str):
        return value
    parsed = read_literal(value)
    return parsed if parsed is not None else value.strip()


OPEN_THOUGHT = re.compile(r"<think>\s*\Z")  # at the end of a prompt: the template opens the thoughts of the answer
EMPTY_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Separately tokenized part of an example's text, e.g. one assistant turn."""

    text: str
    is_trained: bool  # whether the model is trained on the tokens of the piece
    is_chat_text: bool = True  # part of a chat; False: plain text, for which the tokenizer adds BOS and EOS
    encoded_images: tuple[ImageTokens, ...] = ()  # images whose placeholders are in the text, in order


@dataclass(frozen=True)
class RowContext:
    """What the columns beside the chat of a data row (CONTEXT_COLUMNS) add to it."""

    template_arguments: JsonObject
    messages: list[Message]  # system message and earlier turns
    images: list[EncodedImage] | None  # of the column `images`
    reader: ImageReader

    @classmethod
    def from_row(cls, row: Mapping[str, Any], reader: ImageReader) -> RowContext:
        """Read the columns. Raises ValueError if one is malformed."""
        return cls(read_template_arguments(row), read_context(row), read_image_column(row, reader), reader)

    def read_chat(self, value: Sequence[object], column: str) -> list[Message]:
        """Read the chat in a column, with its images, after the messages of the context. Raises ValueError if it is
        malformed."""
        return join_context(self.messages, place_images(read_chat(value, repr(column), self.reader), self.images))

    def check_has_no_images(self, column: str) -> None:
        """Raise ValueError if there are images, because the prompt in `column` is a text."""
        if self.images:
            example = [{"role": "user", "content": f"{IMAGE_MARK} ..."}]
            raise ValueError(f"{column!r} is a text, but the row has images. Use a chat, e.g. {example}.")


def split_chat(
    chat: Sequence[Message], renderer: Renderer, last_turn_only: bool = False, in_one_example: bool = False
) -> list[list[TextPiece]]:
    """Split a chat into examples. All assistant messages are trained on, except those with `train: False` and a first
    message, which answers nothing; with last_turn_only, only the last one. With in_one_example, a turn follows the
    earlier ones as the model wrote them, also if the template rewrites them. Raises ValueError if there is nothing to
    train on, or the template does not show it."""
    check_chat_is_shown(chat, renderer)
    template = str(renderer.tokenizer.chat_template)
    if "</think>" not in template and any(f".{key}" in template for key in THOUGHT_KEYS):  # gpt-oss: no inline thoughts
        chat = [add_thoughts(drop_thoughts(one), read_thoughts(one) or read_inline_thoughts(one)) for one in chat]
    answers = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    turns = [index for index in answers if index and chat[index].get("train", True)][-1 if last_turn_only else 0 :]
    if not turns:
        reason = "its assistant messages are excluded (weight 0) or first" if answers else "it has no assistant message"
        raise ValueError(f"the chat has nothing to train on: {reason}. Add an answer or remove the row.")
    examples: list[list[TextPiece]] = []
    seen, num_seen = "", 0  # text and number of messages of the current example
    for turn in turns:
        prompt, answer = render_turn(chat, turn, renderer)
        if in_one_example and seen and not prompt.startswith(seen):
            prompt = seen + _find_text_after(seen, examples[-1][-1].text, prompt, turn)
        if not seen or not prompt.startswith(seen):
            examples.append([])
            seen, num_seen = "", 0
        encoded_images = renderer.tokenize_images(chat[num_seen:turn])
        pieces = [TextPiece(prompt[len(seen) :], False, encoded_images=encoded_images), TextPiece(answer, True)]
        if images := renderer.images:
            for piece in pieces:
                images.check_placeholders(piece.text.count(images.placeholder), len(piece.encoded_images))
        examples[-1] += pieces
        seen, num_seen = prompt + answer, turn + 1
    return examples


def render_turn(chat: Sequence[Message], turn: int, renderer: Renderer) -> tuple[str, str]:
    """Return the prompt of an assistant turn, and the text that the model must write, including the end of the turn.
    Raises ValueError if the turn is empty, or no text of the rendered chat is the answer to the prompt."""
    message = chat[turn]
    if not (message["content"].strip() or message.get("tool_calls") or read_thoughts(message)):
        raise ValueError(f"the assistant message {turn} is empty. Fill it or remove the row.")
    prompt = renderer.render_chat(chat[:turn])
    answer = _find_answer(chat[:turn], message, prompt, renderer)
    if answer is None:  # the template drops the thoughts of earlier turns because of this one
        bare = [drop_thoughts(one) for one in chat[:turn]]
        answer = _find_answer(bare, message, renderer.render_chat(bare), renderer)
    if answer is None:
        raise ValueError(
            f"the rendered chat does not continue the prompt of message {turn}, which ends with {prompt[-40:]!r}. If "
            "the prompt closes the thoughts (enable_thinking=false), remove the thoughts of the message. Otherwise, "
            "use another chat_template."
        )
    return prompt, answer


def _find_answer(history: Sequence[Message], message: Message, prompt: str, renderer: Renderer) -> str | None:
    """Return the text that the model must write after a prompt; None if the rendered chat does not continue it, or the
    prompt ends thoughts that the message has."""
    chat = [*history, message]
    shown = renderer.render_chat(chat, add_generation_prompt=False)
    start = OPEN_THOUGHT.sub("", prompt)
    if shown.startswith(prompt):
        answer = shown[len(prompt) :]
    elif shown.startswith(start) and start != prompt:  # the chat shows no thoughts, or empty ones of another format
        answer = shown[len(start) :].removeprefix("<think>")
    else:
        return None
    (own,) = renderer.split_control_strings([message])  # as in `shown`
    thoughts = read_thoughts(own) or read_inline_thoughts(own)
    if thoughts and prompt.rstrip().endswith("</think>"):
        return None
    before, end, _ = answer.partition("</think>")
    if start == prompt and thoughts.strip() not in answer:
        answer = f"<think>\n{thoughts}\n</think>\n\n{EMPTY_THOUGHT.sub('', answer)}"
    elif start != prompt and not end:
        answer = f"{thoughts}\n</think>\n\n" + answer.lstrip("\n")
    elif start != prompt and thoughts.strip() not in before:
        answer = thoughts + answer
    stops = renderer.tokenizer.convert_ids_to_tokens([*renderer.eos_token_ids])
    if ends := [answer.index(stop) + len(stop) for stop in stops if stop in answer]:
        return answer[: min(ends)]
    if message.get("tool_calls"):  # GLM ends a turn with the name of the next role, which is another one after a call
        following = renderer.render_chat([*chat, Message(role="tool", content="?")])[len(shown) :]
        if found := next(filter(following.startswith, stops), ""):
            return answer + found
    return answer + "".join(renderer.tokenizer.convert_ids_to_tokens(renderer.missing_end_ids))


def _find_text_after(seen: str, answer: str, prompt: str, turn: int) -> str:
    """Return the text of a prompt after an earlier answer, with which `seen` ends. The template may have dropped the
    thoughts of this answer from the prompt."""
    start = OPEN_THOUGHT.sub("", seen.removesuffix(answer))
    common = count_equal_items(prompt, start)
    _, found, following = prompt[common:].partition(answer.rpartition("</think>")[2].lstrip("\n"))
    if not found:
        raise ValueError(
            f"the chat template changes the turns before message {turn}, so they are no example together. Move these "
            "turns to the prompt."
        )
    return following


def check_chat_is_shown(chat: Sequence[Message], renderer: Renderer) -> None:
    """Raise ValueError if the chat template does not show the content or the calls of a message. Renders the chat with
    other contents, once for each sequence of roles."""
    kind = tuple((one["role"], bool(one["content"].strip()), len(one.get("tool_calls", []))) for one in chat)
    if kind in renderer.checked_chats:
        return
    probes, marks = list[JsonObject](), dict[str, str]()
    for index, message in enumerate(chat):
        probe: JsonObject = {**drop_thoughts(message)}
        if message["content"].strip() and not message.get("images"):
            probe["content"] = mark = f"message{index}x"
            marks[mark] = f"message {index} of the role {message['role']!r}"
        for number, call in enumerate(calls := message.get("tool_calls", [])):
            mark = f"call{index:02}x{number:02}"  # also as id, which some templates show instead
            marked = {**call, "id": mark, "function": {**call["function"], "name": mark}}
            probe["tool_calls"] = [*probe["tool_calls"][:number], marked, *calls[number + 1 :]]
            marks[mark] = f"the tool calls of message {index}"
        probes.append(probe)
    shown = renderer.render_chat(probes)
    if hidden := next((mark for mark in marks if mark not in shown), None):
        raise ValueError(
            f"the chat template does not show {marks[hidden]}. Remove it, write it into a message that is shown, e.g. "
            "of the role user, or use another chat_template."
        )
    renderer.checked_chats.add(kind)
