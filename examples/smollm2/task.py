"""Instructions that a program can verify, and their checkers.

    user: Write one sentence about tea that contains the word 'seven'.
    assistant: My mother drinks seven cups of tea.

Each kind of instruction has a template, the values of its placeholder `{value}`, and a checker. An answer is correct if
its checker accepts it and it is an answer at all (`is_on_topic`). The held-out prompts have other topics than the
training prompts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

TRAIN_TOPICS = (
    "tea", "bread", "cats", "rain", "bicycles", "winter", "music", "trees", "coffee", "horses", "books",
    "mountains", "apples", "trains", "birds", "gardens", "football", "bridges", "milk", "stars", "teachers", "dogs",
    "rivers", "clocks", "carrots", "ships", "candles", "bees", "paper", "dancing", "doctors", "castles", "wool",
    "chess", "soup", "islands", "lamps", "farmers", "honey", "kites",
)  # fmt: skip
HELD_OUT_TOPICS = (
    "elephants", "chocolate", "airplanes", "snow", "guitars", "roses", "pizza", "lions", "museums", "rice",
    "swimming", "planets", "shoes", "spiders", "painting", "forests", "robots", "cheese", "hotels", "whales",
)  # fmt: skip

WORD = re.compile(r"[a-z0-9]+(?:['-][a-z0-9]+)*")
SENTENCE_END = re.compile(r"[.!?]+[\"')*]*(?=\s|$)")
ABOUT_THE_INSTRUCTION = {
    "sentence",
    "sentences",
    "word",
    "words",
    "letter",
    "lowercase",
    "exclamation",
    "quotes",
    "commas",
}
MIN_NEW_WORDS = 3
MAX_COPIED_WORDS = 4


@dataclass(frozen=True)
class Kind:
    """Kind of instruction: template, possible values of `{value}`, and checker of (answer, value)."""

    template: str
    values: tuple[str, ...]
    check: Callable[[str, str], bool]


@dataclass(frozen=True)
class Instruction:
    """Ground truth of a prompt."""

    kind: str
    topic: str
    value: str

    @property
    def text(self) -> str:
        return KINDS[self.kind].template.format(topic=self.topic, value=self.value)

    def is_followed_by(self, answer: str) -> bool:
        """Return whether an answer is correct."""
        answer, count = answer.strip(), 2 if self.kind == "twice" else 1
        return is_on_topic(answer, self.text, self.topic, count) and KINDS[self.kind].check(answer, self.value)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def find_words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def is_on_topic(answer: str, prompt: str, topic: str, count: int = 1) -> bool:
    """Return whether a text is an answer and not an echo of the prompt or a text about it: it names the topic `count`
    times, has no word such as "sentence", has at least three words that the prompt lacks, copies at most four
    successive words of the prompt, and at least half of its words are different."""
    words, asked = find_words(answer), find_words(prompt)
    copies = {tuple(asked[start : start + MAX_COPIED_WORDS + 1]) for start in range(len(asked) - MAX_COPIED_WORDS)}
    runs = (tuple(words[start : start + MAX_COPIED_WORDS + 1]) for start in range(len(words) - MAX_COPIED_WORDS))
    mentions = [word.split("'")[0].removesuffix("s") for word in words].count(topic.removesuffix("s"))
    return (
        mentions >= count
        and not ABOUT_THE_INSTRUCTION & {*words}
        and len({*words} - {*asked}) >= MIN_NEW_WORDS
        and 2 * len({*words}) >= len(words)
        and not any(run in copies for run in runs)
    )


def count_sentences(text: str) -> int:
    """Number of sentences, 0 if the last one is incomplete, one has no letters (`1.`), or there are paragraphs."""
    *sentences, rest = SENTENCE_END.split(text)
    is_complete = not rest and "\n" not in text and all(re.search("[a-z]", one, re.I) for one in sentences)
    return len(sentences) if is_complete else 0


def is_sentence(text: str) -> bool:
    return count_sentences(text) == 1


def is_list(text: str, count: int, mark: str) -> bool:
    """Whether each line is an item: `mark`, where `#` is the number of the line, and a text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marks = [mark.replace("#", str(number)) for number in range(1, len(lines) + 1)]
    return len(lines) == count and all(
        line.startswith(mark) and find_words(line.removeprefix(mark)) for line, mark in zip(lines, marks, strict=True)
    )


def is_json(text: str, key: str) -> bool:
    """Whether a text is a JSON object with just the keys "name" and `key`, and texts as values. It may be fenced."""
    try:
        found = json.loads(text.removeprefix("```json").removeprefix("```").removesuffix("```"))
    except ValueError:
        return False
    return isinstance(found, dict) and {*found} == {"name", key} and all(isinstance(v, str) for v in found.values())


NONE = ("",)
SENTENCE = "Write one sentence about {topic}"
KINDS = {
    "title": Kind(
        "Write the title of a book about {topic}. Start each word with a capital letter.",
        NONE,
        lambda answer, _: (
            "\n" not in answer and all(word[0].isupper() for word in re.findall(r"[a-z][\w'-]*", answer, re.I))
        ),
    ),
    "contains": Kind(
        f"{SENTENCE} that contains the word '{{value}}'.",
        ("seven", "yellow", "quiet", "morning", "friend", "window"),
        lambda answer, word: is_sentence(answer) and word in find_words(answer),
    ),
    "starts": Kind(
        f"{SENTENCE} that starts with the word '{{value}}'.",
        ("Every", "Most", "Today", "When", "Some", "Many"),
        lambda answer, word: is_sentence(answer) and answer.startswith(f"{word} "),
    ),
    "ends": Kind(
        f"{SENTENCE} that ends with the words '{{value}}'.",
        ("every day", "at home", "the world", "my life"),
        lambda answer, words: is_sentence(answer) and find_words(answer)[-2:] == words.split(),
    ),
    "twice": Kind(
        f"{SENTENCE} that contains the word '{{topic}}' twice.",
        NONE,
        lambda answer, _: is_sentence(answer),  # Instruction.is_followed_by counts the topic
    ),
    "no_letter": Kind(
        f"{SENTENCE} without the letter '{{value}}'.",
        ("m", "p", "b", "g", "v", "y"),
        lambda answer, letter: is_sentence(answer) and letter not in answer.lower(),
    ),
    "exclamation": Kind(
        "Write one excited slogan about {topic}! End it with an exclamation mark!",
        NONE,
        lambda answer, _: is_sentence(answer) and answer.endswith("!"),
    ),
    "number": Kind(
        f"{SENTENCE}. Use a number in digits.",
        NONE,
        lambda answer, _: is_sentence(answer) and any(character.isdigit() for character in answer),
    ),
    "quoted": Kind(
        f'{SENTENCE}. Put it in double quotes, "like this."',
        NONE,
        lambda answer, _: answer[:1] == answer[-1:] == '"' and is_sentence(answer[1:-1]),
    ),
    "at_most": Kind(
        f"{SENTENCE} with at most {{value}} words.",
        ("8", "9", "10"),
        lambda answer, count: is_sentence(answer) and len(find_words(answer)) <= int(count),
    ),
    "two_sentences": Kind(
        "Write exactly two sentences about {topic}.", NONE, lambda answer, _: count_sentences(answer) == 2
    ),
    "no_commas": Kind(
        "Write two sentences about {topic} without commas.",
        NONE,
        lambda answer, _: count_sentences(answer) == 2 and "," not in answer,
    ),
    "question": Kind(
        "Write one quiz question about {topic}, without the answer.",
        NONE,
        lambda answer, _: is_sentence(answer) and answer.endswith("?"),
    ),
    "bullets": Kind(
        "Write a bullet list of {value} facts about {topic}.",
        ("2", "3"),
        lambda answer, count: any(is_list(answer, int(count), f"{mark} ") for mark in "-*•"),
    ),
    "numbered": Kind(
        "Write a numbered list of {value} facts about {topic}.",
        ("2", "3"),
        lambda answer, count: is_list(answer, int(count), "#. "),
    ),
    "json": Kind(
        'Describe {topic} in JSON, like this: {{"name": "{topic}", "{value}": "..."}}',
        ("fact", "use", "text"),
        is_json,
    ),
}


def make_instructions(count: int, topics: Sequence[str], seed: str) -> Iterator[Instruction]:
    """Yield different instructions, always the same ones. Kinds take turns, topics and values are random."""
    rng = random.Random(seed)
    names, used = list(KINDS), set[Instruction]()
    while len(used) < count:
        one = Instruction(kind := names[len(used) % len(names)], rng.choice(topics), rng.choice(KINDS[kind].values))
        if one not in used and not (kind == "no_letter" and one.value in one.topic):
            used.add(one)
            yield one
