"""mini-swe-agent repairs a small repository in a bubblewrap sandbox that has a shell.

    env.agent.command="mini-swe-env/bin/python examples/agents/harnesses/mini_swe_agent.py"

The column `env_kwargs` of the data has `files`, the repository, and `test`, a command. The reward is 1 if it succeeds.
"""

import json
import os
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You repair programs. Use bash. When you are done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

task = json.loads(Path(os.environ["ALPHAAPOLLO_TASK"]).read_text())
sandbox = BubblewrapEnvironment()
for name, text in task["env_kwargs"]["files"].items():
    (sandbox.working_dir / name).write_text(text)
model = LitellmModel(model_name=f"openai/{os.environ['OPENAI_MODEL']}", cost_tracking="ignore_errors")
agent = DefaultAgent(model, sandbox, system_template=SYSTEM, instance_template="{{task}}", step_limit=10)
agent.run(task["content"][-1]["content"])
tested = sandbox.execute({"command": task["env_kwargs"]["test"]})
print(float(tested["returncode"] == 0))
