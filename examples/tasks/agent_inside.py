"""An agent in the sandbox of its task: a program that reaches the policy, and nothing else, over HTTP.

python -m alphaapollo.trainer.main_ppo env.env_name=agent env.agent.path=examples/tasks/agent_inside.py ...
"""

from alphaapollo.plugins.tasks.harbor import open_trial

PROGRAM = b"""
import json, os, re, subprocess, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1] + " Write one command in ```bash ... ```, or DONE."}]
for _ in range(4):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    block = re.search(r"```bash\\n(.*?)```", message["content"], re.DOTALL)
    if not block:
        break
    done = subprocess.run(["bash", "-c", block[1]], capture_output=True, text=True, timeout=30)
    messages += [message, {"role": "user", "content": f"exit code {done.returncode}\\n{done.stdout[-2000:]}"}]
"""


async def run(task, endpoint):
    async with open_trial(task["env_kwargs"]["task"], endpoint=endpoint.base_url) as trial:
        await trial.sandbox.write("/agent", {"agent.py": PROGRAM})
        variables = {
            "OPENAI_BASE_URL": trial.endpoint,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
            "INSTRUCTION": trial.task.instruction,
        }
        done = await trial.exec('python3 /agent/agent.py "$INSTRUCTION"', environment=variables)
        if done.code:
            raise RuntimeError(f"the agent failed: {done.reason or done.output[-1000:]}")
        return (await trial.verify()).reward
