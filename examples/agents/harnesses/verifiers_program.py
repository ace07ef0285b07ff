"""An environment of the verifiers library, with the client that it brings.

    env.agent.command="verifiers-env/bin/python examples/agents/harnesses/verifiers_program.py"

The column `env_kwargs` of the data has `taskset`, the id of a taskset, and `index`, the number of its task.
"""

import asyncio
import itertools
import json
import os
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.utils import loaders


async def main():
    chosen = json.loads(Path(os.environ["ALPHAAPOLLO_TASK"]).read_text())["env_kwargs"]
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = loaders.resolve_env_config({"taskset": {"id": chosen["taskset"]}, "agent": agent})
    environment = loaders.load_environment(config)
    (task,) = itertools.islice(environment.taskset, chosen["index"], chosen["index"] + 1)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client))
    if not episode.ok:
        raise SystemExit(f"the episode failed: {[trace.errors for trace in episode.traces]}")
    reward = sum(trace.reward for trace in episode.traces)
    Path(os.environ["ALPHAAPOLLO_RESULT"]).write_text(json.dumps(reward))


asyncio.run(main())
