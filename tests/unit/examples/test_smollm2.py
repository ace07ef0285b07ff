"""Checkers of examples/smollm2: correct answers pass, and answers that a model may exploit fail."""

from __future__ import annotations

import pytest

from alphaapollo.types import Prompt
from examples.smollm2.reward import compute_score
from examples.smollm2.task import KINDS, Instruction

CORRECT = {  # kind -> correct answers about tea, and the value of the instruction
    "title": ("", "The Long Journey Of Green Tea"),
    "contains": ("seven", "My mother drinks seven cups of tea."),
    "starts": ("Every", "Every cup of tea tastes different."),
    "ends": ("at home", "Good tea is best at home."),
    "twice": ("", "Green tea and black tea grow on hills."),
    "no_letter": ("m", "Tea is a hot drink."),
    "exclamation": ("", "Hot tea tastes so good!"),
    "number": ("", "Hot tea needs 5 minutes."),
    "quoted": ("", '"My grandmother loves green tea."'),
    "at_most": ("8", "Tea is a hot drink made from leaves."),
    "two_sentences": ("", "Tea is a drink. It grows on hills, mostly."),
    "no_commas": ("", "Tea is a drink. It grows on hills."),
    "question": ("", "Who drinks green tea?"),
    "bullets": ("2", "- Tea is hot.\n- It grows on hills."),
    "numbered": ("2", "1. Tea is hot.\n2. It grows on hills."),
    "json": ("use", '{"name": "tea", "use": "People drink hot tea daily."}'),
}
WRONG = {  # nearly correct
    "title": "The Long Journey of Green Tea",
    "contains": "My mother drinks seventeen cups of tea.",
    "starts": "Everyone likes a cup of tea.",
    "ends": "At home everybody likes good tea.",
    "twice": "Green tea grows on high hills.",
    "no_letter": "My tea is a hot drink.",
    "exclamation": "Tea! It tastes so good!",
    "number": "Hot tea needs five minutes.",
    "quoted": 'The words are "green tea".',
    "at_most": "Tea is a hot drink that is made from the leaves of a plant.",
    "two_sentences": "Tea is a drink. It is hot. It is green.",
    "no_commas": "Tea is a drink. It grows on hills, mostly.",
    "question": "I love green tea and hot milk.",
    "bullets": "- Tea is hot.\n- \n- It grows.",
    "numbered": "1. Tea is hot.\n3. It grows on hills.",
    "json": '{"name": "tea", "use": ["People drink hot tea"]}',
}


def correct(kind: str) -> tuple[Instruction, str]:
    value, answer = CORRECT[kind]
    return Instruction(kind, "tea", value), answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_correct_answer_is_rewarded(kind: str) -> None:
    instruction, answer = correct(kind)
    prompt = Prompt(0, f"smollm2/{kind}", instruction.text, instruction.as_dict())
    assert compute_score(prompt, f"{answer}\n") == {"reward": 1.0, "accuracy": 1.0}
    assert compute_score(prompt, WRONG[kind])["reward"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_exploits_are_not_rewarded(kind: str) -> None:
    """Empty answers, echoes, single words, the prompt's example about the topic, and answers about something else."""
    instruction, answer = correct(kind)
    text, value = instruction.text, instruction.value
    example = text.partition("like this: ")[2] or text.partition("like this:\n")[2]
    template = KINDS[kind].template.format(topic="", value="")
    echoes = [text, text.lower(), template, f"{text} {text}", text.partition(",")[0] + ".", f'"{text}"']
    echoes += [
        f"This sentence about tea ends with {value}.",
        f"A sentence about tea that contains the word {value}.",
        f"{value} tea {value} tea.",
        f"- {text}\n- {text}",
    ]
    single = ["tea", "Tea.", "tea!", "tea?", '"tea."', value, f"{value}.", "1. tea\n2. tea", '{"name": "tea"}']
    copies = [example, example.replace("sea", "tea"), example.replace("The sea", "Tea")]
    others = [answer.replace("tea", "milk").replace("Tea", "Milk")]
    for exploit in ["", " ", "\n", ".", *echoes, *single, *copies, *others]:
        assert not instruction.is_followed_by(exploit), exploit
