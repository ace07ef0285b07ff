import subprocess
import sys

HANGING = """
import asyncio, time
from alphaapollo.rollout.episode import EnvironmentCaller
from alphaapollo.processes.time_limit import TimeLimit

class Game:
    def reset(self, prompt):
        time.sleep(3600 if prompt == "hang" else 0)
        return prompt + "!"

async def run():
    caller = EnvironmentCaller(max_threads=2)

    def call(prompt):
        return asyncio.create_task(caller.call(TimeLimit(60.0), Game(), "reset", prompt))

    hanging = [call("hang") for _ in range(4)]
    await asyncio.wait(hanging, timeout=0.1)
    for task in hanging:
        task.cancel()
    print(await asyncio.gather(*map(call, "ab")))

asyncio.run(run())
"""


def test_hanging_call_blocks_neither_other_calls_nor_the_exit():
    """Two at a time: four calls hang and are given up; then two others have their turns, and the process ends."""
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['a!', 'b!']\n"
