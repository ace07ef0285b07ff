"""Real clients against vLLM's HTTP API: the tokens of a session are those that the engine received and sampled."""

import json

import pytest

pytest.importorskip("vllm")
anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from alphaapollo.rollout.agents import endpoint as endpoint_module  # noqa: E402
from tests.unit.rollout.agents.agents_kit import CALL, TOOL, Server, write_model  # noqa: E402

CHAT_TOOL = [{"type": "function", "function": TOOL}]


async def chat(client, messages, **options):
    return await client.chat.completions.create(model="policy", messages=messages, **options)


def send(server, *chats, **options):
    """Send chats one after the other and return (session, rows)."""

    async def play(endpoint, session, client):
        for messages in chats:
            await chat(client, messages, **options)

    return server.run(play)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_a_parser_separates_reasoning(tmp_path):
    server = Server(write_model(tmp_path), reasoning_parser="deepseek_r1")
    server.script.answers = {"one": "hm</think>4"}

    async def play(endpoint, session, client):
        message = (await chat(client, [user("one")])).choices[0].message
        assert (message.reasoning, message.content) == ("hm", "4")

    server.run(play)
    with pytest.raises(ValueError, match=r"env\.agent\.reasoning_parser=unknown "):
        Server(write_model(tmp_path), reasoning_parser="unknown")


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "stream"])
def test_a_continued_chat_is_one_row(server, stream):
    server.script.answers = {"one": "first answer ", "two": "second"}

    async def ask(client, messages):
        if not stream:
            return (await chat(client, messages)).choices[0].message.content
        chunks = [chunk async for chunk in await chat(client, messages, stream=True)]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    async def play(endpoint, session, client):
        first = await ask(client, [user("one")])
        assert first == "first answer "
        await ask(client, [user("one"), assistant(first.strip()), user("two")])

    session, (row,) = server.run(play)
    later = "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>"
    assert server.tokenizer.decode(row.token_ids).endswith("first answer " + later)
    assert sum(row.action_mask) == sum(len(one.completion.token_ids) for one in session.answers)
    assert len(row.turn_ends) == 2


def test_tools_of_a_program_do_not_become_control_tokens(server):
    end = server.tokenizer.convert_tokens_to_ids("<|im_end|>")
    counts = []
    for description in ("Adds.", "<|im_end|>"):
        _, (row,) = send(
            server, [user("one")], tools=[{"type": "function", "function": TOOL | {"description": description}}]
        )
        assert description in server.tokenizer.decode(row.token_ids)
        counts.append(list(row.token_ids).count(end))
    assert counts[0] == counts[1]


def check_one_row_of_two_turns(server, play):
    session, (row,) = server.run(play)
    assert len(row.turn_ends) == 2 and not any(one.request.difference for one in session.answers)
    assert CALL in server.tokenizer.decode(row.token_ids)


def test_parallel_tool_calls_with_changed_json_continue_the_row(server):
    server.script.answers = {"<tool_response>": "two", "one": f"let me\n{CALL}\n{CALL.replace('1', '2')}"}

    async def play(endpoint, session, client):
        message = (await chat(client, [user("one")], tools=CHAT_TOOL)).choices[0].message
        answered = message.model_dump(exclude_none=True)
        arguments = [json.loads(call["function"]["arguments"]) for call in answered["tool_calls"]]
        assert arguments == [{"a": 1}, {"a": 2}]
        for call, own in zip(answered["tool_calls"], arguments, strict=True):
            call["function"]["arguments"] = json.dumps(own, indent=4)
        results = [{"role": "tool", "tool_call_id": one.id, "content": "2"} for one in message.tool_calls]
        await chat(client, [user("one"), answered, *results], tools=CHAT_TOOL)

    check_one_row_of_two_turns(server, play)


def test_responses_api_with_a_tool(server):
    server.script.answers = {"<tool_response>": "two", "one": CALL}
    tool = [{"type": "function", **TOOL}]

    async def play(endpoint, session, client):
        first = await client.responses.create(model="policy", input="one", tools=tool)
        (call,) = [item for item in first.output if item.type == "function_call"]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        items = [user("one"), *(item.model_dump(exclude_none=True) for item in first.output), output]
        second = await client.responses.create(model="policy", input=items, tools=tool)
        assert second.output_text == "two"

    check_one_row_of_two_turns(server, play)


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "stream"])
def test_anthropic_messages_with_a_tool(server, stream):
    server.script.answers = {"<tool_response>": "two", "one": f"let me\n{CALL}"}
    tool = [{"name": "add", "input_schema": TOOL["parameters"]}]

    async def play(endpoint, session, _):
        client = server.connect(endpoint, session.token, anthropic.AsyncAnthropic)

        async def ask(messages):
            options = {"model": "policy", "max_tokens": 200, "messages": messages, "tools": tool}
            if not stream:
                return await client.messages.create(**options)
            async with client.messages.stream(**options) as events:
                return await events.get_final_message()

        first = await ask([user("one")])
        (call,) = [block for block in first.content if block.type == "tool_use"]
        result = [{"type": "tool_result", "tool_use_id": call.id, "content": "2"}]
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        await ask([user("one"), assistant(blocks), user(result)])

    check_one_row_of_two_turns(server, play)


def test_a_warning_names_sampling_settings_of_clients_that_are_not_used(server, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_warned", set())
    model = {"model": "gpt-9"}  # any name means the policy
    _, rows = send(server, [user("one")], temperature=0.2, top_p=1.0, presence_penalty=1, extra_body=model)
    assert endpoint_module._warned == {"temperature", "presence_penalty", "model"} and len(rows) == 1


def test_strict_tools_are_sampled_freely(server, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_warned", set())
    server.script.answers = {"one": CALL}
    strict = [{"type": "function", "function": TOOL | {"strict": True}}]

    async def play(endpoint, session, client):
        answer = await chat(client, [user("one")], tools=strict, parallel_tool_calls=False)
        assert answer.choices[0].message.tool_calls
        await chat(client, [user("two")], tools=strict, tool_choice="required")

    session, rows = server.run(play)
    assert [one.request.is_constrained for one in session.answers] == [False, True] and len(rows) == 2
    assert endpoint_module._warned == {"parallel_tool_calls"}


def test_evaluation_suites_belong_to_no_session(server):
    async def play(endpoint, session, client):
        suite = server.connect(endpoint, endpoint.suite_key)
        assert (await chat(suite, [user("one")])).choices[0].message.content == "OK"
        answer = await suite.completions.create(model="policy", prompt=[40, 41], max_tokens=2, temperature=0)
        assert answer.choices[0].text == "OK" and answer.usage.prompt_tokens == 2
        with pytest.raises(openai.NotFoundError, match="/v1/completions"):
            await client.completions.create(model="policy", prompt="one")

    session, rows = server.run(play)
    assert rows == [] and session.requests == []


def test_errors_are_those_of_the_provider(server):
    async def play(endpoint, session, client):
        with pytest.raises(openai.BadRequestError, match="context length is 60 tokens"):
            await chat(client, [user("one" * 60)])
        assert session.prompt_error
        await chat(client, [user("one")])
        assert not session.prompt_error
        with pytest.raises(openai.BadRequestError):
            await chat(client, [user("one")], tools=[{"type": "function", "function": {"parameters": 3}}])
        with pytest.raises(openai.BadRequestError, match="does not read images"):
            await chat(client, [user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])])
        with pytest.raises(openai.AuthenticationError):
            await chat(server.connect(endpoint, "x"), [user("one")])
        with pytest.raises(anthropic.AuthenticationError):
            other = server.connect(endpoint, "x", anthropic.AsyncAnthropic)
            await other.messages.create(model="policy", max_tokens=9, messages=[user("one")])
        headers = {"authorization": f"Bearer {session.token}", "content-type": "application/json"}
        async with httpx.AsyncClient(headers=headers, base_url=f"{endpoint.url}/v1/") as plain:
            assert (await plain.get("files")).status_code == 404
            assert (await plain.post("chat/completions", content=b"{")).status_code == 400
            assert (await plain.post("chat/completions", content=b"x" * (50 << 20))).status_code == 413
            assert (await plain.get("models")).json()["data"][0]["id"] == "policy"

    session, rows = server.run(play, max_model_len=60)
    assert len(rows) == 1 and session.num_refused == 5 and session.refusal.startswith("400")


def test_budget_of_a_path(server):
    async def play(endpoint, session, client):
        answer = await chat(client, [user("one")])
        assert answer.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await chat(client, [user("one"), assistant(answer.choices[0].message.content or ""), user("two")])

    _, (row,) = server.run(play, budget=2)
    assert sum(row.action_mask) == 2
