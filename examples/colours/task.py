"""Images of a coloured shape, and a teacher that names the colours.

    user: <a red disc> colour?
    assistant: red

The teacher of the warm-up is partly colour-blind: in four of five answers it calls red green, purple blue, and white
yellow. After the warm-up, the model can tell six colours apart, but most likely gives these wrong answers. Only the
reward shows which answers are right.
"""

from __future__ import annotations

import random

from PIL import Image, ImageDraw

from alphaapollo.data.images import encode_png
from alphaapollo.types import IMAGE_MARK, Message

COLOURS = {
    "red": (210, 45, 45),
    "green": (45, 165, 65),
    "blue": (45, 75, 210),
    "purple": (155, 50, 185),
    "yellow": (210, 200, 50),
    "white": (220, 220, 220),
}
CONFUSED = {"red": "green", "purple": "blue", "white": "yellow"}  # right name: name that the teacher prefers
KNOWS = 0.2  # probability that the teacher gives the right name of a colour in CONFUSED
QUESTION = "colour?"
SIZE = 32  # pixels of an image in each direction


def draw_shape(colour: str, rng: random.Random) -> bytes:
    """Draw a square or a disc on a dark background and return the image as PNG. Size, position and shades are
    random."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.randint(0, 60) for _ in range(3)))
    canvas = ImageDraw.Draw(image)
    draw, width = rng.choice((canvas.rectangle, canvas.ellipse)), rng.randint(10, 20)
    left, top = rng.randint(0, SIZE - width), rng.randint(0, SIZE - width)
    shade = tuple(level + rng.randint(-30, 30) for level in COLOURS[colour])
    draw((left, top, left + width - 1, top + width - 1), shade)
    return encode_png(image)


def choose_colour(rng: random.Random) -> str:
    return rng.choice(list(COLOURS))


def ask(colour: str, rng: random.Random) -> Message:
    """Return a message with an image and the question."""
    return Message(role="user", content=f"{IMAGE_MARK}{QUESTION}", images=[draw_shape(colour, rng)])


def teach(rng: random.Random) -> list[Message]:
    """Make a warm-up example: two images, and what the teacher calls their colours."""
    chat = list[Message]()
    for colour in (choose_colour(rng), choose_colour(rng)):
        name = colour if rng.random() < KNOWS else CONFUSED.get(colour, colour)
        chat += [ask(colour, rng), Message(role="assistant", content=name)]
    return chat
