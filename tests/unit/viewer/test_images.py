"""Images in the viewer: thumbnails, and the route that serves them."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from alphaapollo.runs.rollout_log import name_image
from alphaapollo.viewer.app import make_app
from alphaapollo.viewer.samples import Token, join_equal_tokens
from tests.unit.rollout.test_images import SMALL, WIDE
from tests.unit.viewer.run_kit import make_group, update_index, write_evaluation, write_groups, write_run


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    root = tmp_path / "outputs"
    folder = write_run(root / "first", steps=0)
    group = make_group(17, ("15", 1.0))
    group.prompt.content[1] |= {"content": "<image> How many?", "images": [SMALL]}
    group.trajectories[0].turns[0].observation = [{"role": "tool", "content": "<image>", "images": [WIDE]}]
    write_groups(folder, 1, [group])
    (root / "secret.png").write_bytes(SMALL)
    (folder / "rollouts/images/secret.png").write_bytes(SMALL)
    second = write_evaluation(root / "second")
    (second / "images").mkdir()
    (second / name_image(WIDE)).write_bytes(WIDE)
    return TestClient(make_app(update_index(root), ["testserver"]))


def test_thumbnails_open_the_image(client: TestClient) -> None:
    page = client.get("/runs/1/step/1/0").text
    for encoded_image in (SMALL, WIDE):
        address = f"/runs/1/images/{name_image(encoded_image).removeprefix('images/')}"
        assert f'<a class="image" href="{address}"><img src="{address}" alt="image 1 of this message"' in page
        response = client.get(address)
        assert response.content == encoded_image and response.headers["content-type"] == "image/png"
        assert "img-src 'self'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
    assert client.get(f"/runs/2/images/{Path(name_image(WIDE)).name}").content == WIDE


@pytest.mark.parametrize(
    "name", ["secret.png", "..%2F..%2F..%2Fsecret.png", "%2e%2e%2fimages", "0" * 32 + ".png", "a%00.png"]
)
def test_only_images_of_the_log_are_served(client: TestClient, name: str) -> None:
    assert client.get(f"/runs/1/images/{name}").status_code == 404
    assert client.get(f"/runs/7/images/{name_image(SMALL).removeprefix('images/')}").status_code == 404


def test_placeholders_of_an_image_are_one_token() -> None:
    tokens = [Token("a", 1, False), *[Token("<|image_pad|>", 5, False)] * 64, *[Token("b", 2, True)] * 9]
    joined = list(join_equal_tokens(tokens))
    assert [token.text for token in joined] == ["a", "<|image_pad|> x 64 ", *["b"] * 9]


def test_link_to_a_file_outside_of_the_run_is_not_served(client: TestClient, tmp_path: Path) -> None:
    name = f"{'a' * 32}.png"
    (tmp_path / "outputs/first/rollouts/images" / name).symlink_to(tmp_path / "outputs/secret.png")
    assert client.get(f"/runs/1/images/{name}").status_code == 404
