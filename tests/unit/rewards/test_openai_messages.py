"""Chats with images in OpenAI's format."""

from alphaapollo.rewards.openai_connection import make_openai_message
from alphaapollo.types import Message


def test_images_are_parts_of_the_content() -> None:
    images = [b"\x89PNG cat", b"\xff\xd8\xff dog"]
    message = Message(role="user", content="what is it? <image> or <image>, see notes.txt", images=images)
    assert make_openai_message(message)["content"] == [
        {"type": "text", "text": "what is it? "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORyBjYXQ="}},
        {"type": "text", "text": " or "},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/IGRvZw=="}},
        {"type": "text", "text": ", see notes.txt"},
    ]
    assert make_openai_message({"role": "user", "content": "<image>"}) == {"role": "user", "content": "<image>"}
