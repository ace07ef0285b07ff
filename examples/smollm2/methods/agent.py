"""Ask for an answer, and once more if it does not follow the instruction. The second answer has half of the reward."""

from openai import AsyncOpenAI

from examples.smollm2.task import Instruction

AGAIN = {"role": "user", "content": "That does not follow the instruction. Try again."}


async def run(task, endpoint):
    client, chat, instruction = AsyncOpenAI(), task["content"], Instruction(**task["ground_truth"])
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(model=endpoint.model, messages=chat, max_tokens=48)
        text = answer.choices[0].message.content
        if instruction.is_followed_by(text):
            return {"reward": reward, "accuracy": 1.0}
        chat = [*chat, {"role": "assistant", "content": text}, AGAIN]
    return {"reward": 0.0, "accuracy": 0.0}
