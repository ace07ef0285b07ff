"""Images of data rows and environments: forms, marks, parts, and numbers that differ."""

import base64
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from alphaapollo.data.image_messages import ImageReader, convert_messages
from alphaapollo.data.prompts import load_prompts
from tests.builders import write_rows
from tests.unit.data.images import make_gif, make_test_image

RED, BLUE = make_test_image(seed=1), make_test_image(seed=2)
DATA_URL = "data:image/png;base64," + base64.b64encode(RED).decode()


def ask(content, **more):
    return {"role": "user", "content": content, **more}


def row_of(content, *encoded_images):
    return {"prompt": [ask(content)], "images": [{"bytes": encoded_image} for encoded_image in encoded_images]}


def load(path, *rows, **settings):
    return load_prompts(write_rows(path / "data.parquet", rows), "prompt", **settings)


FORMS = [
    RED,
    {"bytes": RED, "path": "unused.png"},
    {"bytes": None, "path": "red.png"},
    {"image": "red.png"},
    "red.png",
    Path("red.png"),
    DATA_URL,
    {"image_url": {"url": DATA_URL}},
]


@pytest.mark.parametrize("value", FORMS)
def test_every_form_of_an_image(tmp_path, value):
    (tmp_path / "red.png").write_bytes(RED)
    encoded_image = ImageReader(tmp_path).read(value)
    assert encoded_image == (str(tmp_path / "red.png") if "red.png" in str(value)[-30:] else RED)


BAD_IMAGES = [
    (7, "image is 7. "),
    ({"bytes": None, "path": None}, "image is None. "),
    ("https://x.org/a.png", "https://x.org/a.png. .*data.allow_image_urls=true"),
    ("data:image/png;base64,!", "0 bytes: unknown format"),
    ("nothing.png", "nothing.png: No such file"),
    (make_gif(3), "animated"),
]


@pytest.mark.parametrize(
    ("value", "message"),
    BAD_IMAGES,
    ids=["number", "empty struct", "address", "invalid base64", "missing", "animated"],
)
def test_bad_images_are_errors(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        ImageReader(tmp_path, allow_urls=False).read(value)


def test_all_bad_rows_of_a_file_are_in_one_error(tmp_path):
    bad = [row_of("<image>", encoded_image) for encoded_image in (b"x", make_gif(), RED[:9])]
    reasons = ["3 of 4 rows", "row 1: .*unknown format", "row 2: .*animated", "row 3: .*9 bytes"]
    with pytest.raises(ValueError, match=r".*\n *".join(reasons)):
        load(tmp_path, row_of("<image>", RED), *bad)


def test_marks_get_the_images_of_the_column_in_order(tmp_path):
    chat = [ask("<image> and"), {"role": "assistant", "content": "?"}, ask("a <image> b <image>")]
    (prompt,) = load(tmp_path, {"prompt": chat, "images": [{"bytes": one} for one in (RED, BLUE, RED)]})
    assert [message.get("images") for message in prompt.content] == [[RED], None, [BLUE, RED]]
    assert [message["content"] for message in prompt.content] == [message["content"] for message in chat]
    assert "images" not in prompt.extra_info


def test_parts_become_text_with_marks(tmp_path):
    image = {"type": "image", "text": None}
    parts = [image, {"type": "text", "text": "a "}, image, {"type": "text", "text": " b"}]
    (prompt,) = load(tmp_path, row_of(parts, RED, BLUE))
    assert prompt.content == [ask("<image>a <image> b", images=[RED, BLUE])]
    parts = [{"type": "image", "image": RED}, {"type": "image_url", "image_url": {"url": DATA_URL}}]
    assert convert_messages([ask([*parts, {"type": "text", "text": "?"}])]) == [
        ask("<image><image>?", images=[RED, RED])
    ]


def differ(num_marks, num_images):
    return rf"marks <image> \({num_marks}\) and images \({num_images}\)"


BAD_CHATS = [
    (row_of("<image><image>", RED), f"row 1: the chat has .*{differ(2, 1)}"),
    (row_of("<image>", RED, RED), f"row 1: the chat has .*{differ(1, 2)}"),
    (row_of("<image>"), f"row 1: the chat has .*{differ(1, 0)}"),
]
BAD_MESSAGES = [  # of an environment
    (ask("<image>", images=[RED, BLUE]), f"role user has .*{differ(1, 2)}"),
    ({"role": "assistant", "content": "<image>", "images": [RED]}, "assistant message has images"),
    (ask([{"type": "video"}]), "part of a message is .*video"),
    (ask([{"type": "image"}]), differ(1, 0)),
    (ask([{"type": "image", "image": "https://x.org/a.png"}]), "https://x.org/a.png. .*bytes"),
]


@pytest.mark.parametrize(("row", "what"), BAD_CHATS)
def test_different_numbers_of_marks_and_images(tmp_path, row, what):
    with pytest.raises(ValueError, match=what):
        load(tmp_path, row_of("<image>", RED), row)


@pytest.mark.parametrize(("message", "what"), BAD_MESSAGES)
def test_messages_that_cannot_have_these_images(message, what):
    with pytest.raises(ValueError, match=what):
        convert_messages([message])


@pytest.fixture
def server():
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200 if "red" in self.path else 404)
            self.end_headers()
            self.wfile.write(RED)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()


def test_an_address_is_downloaded_once_if_it_is_allowed(tmp_path, server):
    address, requests = server
    rows = [{"prompt": [ask("<image>")], "images": [f"{address}/red.png"]}] * 3
    with pytest.raises(ValueError, match=r"3 of 3 rows.*\n.*row 0: .*/red.png"):
        load(tmp_path, *rows)
    prompts = load(tmp_path, *rows, allow_image_urls=True)
    assert [prompt.content[0]["images"] for prompt in prompts] == [[RED]] * 3 and requests == ["/red.png"]
    with pytest.raises(ValueError, match="HTTP Error 404"):
        ImageReader(allow_urls=True).read(f"{address}/none.png")
