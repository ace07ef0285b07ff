"""Images in requests to vLLM's HTTP API: tokens and tensors come from the model's own image processor."""

import base64

import pytest

pytest.importorskip("vllm")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from alphaapollo.engines.agent_sessions import list_new_messages  # noqa: E402
from tests.unit.rollout.agents.agents_kit import Server  # noqa: E402
from tests.unit.rollout.test_images import draw, encode  # noqa: E402
from tests.vision.models import make  # noqa: E402

FIRST, SECOND = (base64.b64encode(encode(draw(48, 32, red))).decode() for red in (1, 2))
PLACEHOLDERS = 6  # of each


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make("qwen3_vl", folder)
    return Server(folder, max_length=512)


def ask(text, *encoded_images):
    urls = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in encoded_images]
    return {"role": "user", "content": [*urls, {"type": "text", "text": text}]}


async def chat(client, *messages):
    answer = await client.chat.completions.create(model="policy", messages=list(messages))
    return {"role": "assistant", "content": answer.choices[0].message.content}


def test_chat_with_an_image_in_each_turn_is_one_path(server):
    """The second request sends the first image again; its tokens and tensors are those of the first request."""

    async def play(endpoint, session, client):
        answer = await chat(client, ask("one", FIRST))
        await chat(client, ask("one", FIRST), answer, ask("two", SECOND))

    session, _ = server.run(play)
    first, second = session.answers
    encoded_images = [base64.b64decode(one) for one in (FIRST, SECOND)]
    assert list_new_messages(first.request, None) == [
        {"role": "user", "content": "<image>one", "images": encoded_images[:1]}
    ]
    assert list_new_messages(second.request, first)[0]["images"] == encoded_images[1:]
    assert second.parent is first and second.request.prompt_ids[: len(first.token_ids)] == first.token_ids
    assert (
        len(first.request.images) == 1
        and len(second.request.images) == 2
        and second.request.images[0] == first.request.images[0]
    )
    for answer in (first, second):
        placeholders = answer.request.prompt_ids.count(answer.request.images[0].placeholder_id)
        assert placeholders == PLACEHOLDERS * len(answer.request.images)


def test_all_apis_give_the_same_prompt(server):
    async def play(endpoint, session, client):
        await chat(client, ask("one", FIRST))
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{FIRST}"}
        content = [image, {"type": "input_text", "text": "one"}]
        await client.responses.create(model="policy", input=[{"role": "user", "content": content}])
        source = {"type": "base64", "media_type": "image/png", "data": FIRST}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "one"}]
        other = server.connect(endpoint, session.token, anthropic.AsyncAnthropic)
        await other.messages.create(model="policy", messages=[{"role": "user", "content": content}], max_tokens=8)

    session, _ = server.run(play)
    prompts = {tuple(answer.request.prompt_ids) for answer in session.answers}
    assert len(session.answers) == 3 and len(prompts) == 1
    assert len({answer.request.images[0] for answer in session.answers}) == 1
