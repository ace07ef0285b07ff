"""An agent beside the sandbox of its task: it asks the policy for commands, and runs them in the sandbox.

python -m alphaapollo.trainer.main_ppo env.env_name=agent env.agent.path=examples/tasks/agent_outside.py ...
"""

import re

from openai import AsyncOpenAI

from alphaapollo.plugins.tasks.harbor import open_trial

SYSTEM = "Solve the task with bash. Write one command in ```bash ... ``` per turn, or DONE."
TURNS = 4


async def run(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = [{"role": "system", "content": SYSTEM}, *task["content"]]
    async with open_trial(task["env_kwargs"]["task"]) as trial:
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
            text = answer.choices[0].message.content
            if not (block := re.search(r"```bash\n(.*?)```", text, re.DOTALL)):
                break
            done = await trial.exec(block[1], timeout=30)
            reply = {"role": "user", "content": f"exit code {done.code}\n{done.output[-2000:]}"}
            messages += [{"role": "assistant", "content": text}, reply]
        return (await trial.verify()).reward
