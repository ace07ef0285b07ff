"""Images in `alphaapollo chat`: paths in a line, and OpenAI's format."""

from pathlib import Path

import pytest

from alphaapollo.cli.chat import make_user_message, run_chat
from alphaapollo.rewards.openai_connection import make_openai_message


def test_existing_images_in_a_line_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cat.png").write_bytes(b"\x89PNG cat")
    Path("my dog.JPG").write_bytes(b"\xff\xd8\xff dog")
    Path("notes.txt").write_text("a text")
    message = make_user_message("what is it? cat.png or 'my dog.JPG', see notes.txt and gone.png")
    assert message["content"] == "what is it? <image> or <image>, see notes.txt and gone.png"
    assert message["images"] == [b"\x89PNG cat", b"\xff\xd8\xff dog"]
    assert make_user_message("it's  fine") == {"role": "user", "content": "it's  fine"}
    assert make_openai_message(message)["content"] == [
        {"type": "text", "text": "what is it? "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORyBjYXQ="}},
        {"type": "text", "text": " or "},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/IGRvZw=="}},
        {"type": "text", "text": ", see notes.txt and gone.png"},
    ]
    assert make_openai_message({"role": "user", "content": "<image>"}) == {"role": "user", "content": "<image>"}


def test_a_line_may_be_the_path_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cat.png").write_bytes(b"\x89PNG cat")
    lines = iter([f"{tmp_path}/cat.png", f"{tmp_path}/dog.png", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chats = []
    run_chat(lambda messages: chats.append(messages))
    assert [chat[0]["content"] for chat in chats] == ["<image>"]
    assert f"{tmp_path}/dog.png is not a command" in capsys.readouterr().out
