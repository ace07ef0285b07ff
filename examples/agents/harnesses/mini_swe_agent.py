"""mini-swe-agent repairs a small repository in a bubblewrap sandbox that has a shell.

    env.agent.command="mini-swe-env/bin/python examples/agents/harnesses/mini_swe_agent.py"

The column `env_kwargs` of the data has `files`, the repository, `tests`, the files that the agent must not change, and
`test`, a command. The reward is 1 if it succeeds.
"""

import json
import os
import shutil
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment, BubblewrapEnvironmentConfig
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You repair programs. Use bash. When you are done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ALONE = ["-i", shutil.which("bwrap"), "--unshare-all", "--clearenv", "--die-with-parent"]  # arguments of env


def write_files(sandbox, files):
    for name, text in files.items():
        (sandbox.working_dir / name).unlink(missing_ok=True)  # it may be a link
        (sandbox.working_dir / name).write_text(text)


task = json.loads(Path(os.environ["ALPHAAPOLLO_TASK"]).read_text())
settings = task["env_kwargs"]
sandbox = BubblewrapEnvironment(executable="env", wrapper_args=[*ALONE, *BubblewrapEnvironmentConfig().wrapper_args])
write_files(sandbox, settings["files"] | settings["tests"])
model = LitellmModel(model_name=f"openai/{os.environ['OPENAI_MODEL']}", cost_tracking="ignore_errors")
agent = DefaultAgent(model, sandbox, system_template=SYSTEM, instance_template="{{task}}", step_limit=10)
agent.run(task["content"][-1]["content"])
write_files(sandbox, settings["tests"])  # the agent may have changed them
tested = sandbox.execute({"command": settings["test"]})
Path(os.environ["ALPHAAPOLLO_RESULT"]).write_text(json.dumps(float(tested["returncode"] == 0)))
