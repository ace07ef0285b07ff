"""The agent of the reference run with an agent: it asks for a price, and the model may call one tool."""

from openai import OpenAI

PRICE = {
    "name": "price",
    "description": "Look up the price of an item.",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}


def run(task, endpoint):
    client, messages = OpenAI(), list(task["content"])
    for _ in range(3):
        completion = client.chat.completions.create(
            model=endpoint.model, messages=messages, tools=[{"type": "function", "function": PRICE}]
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == task["ground_truth"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": task["ground_truth"]})
    return 0.0
