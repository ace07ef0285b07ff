import subprocess
import sys

HANGING = """
import asyncio, time
from alphaapollo.rollout.sync_method_threads import SyncMethodThreads

async def run():
    calls = SyncMethodThreads(max_concurrent=2)
    hanging = [asyncio.create_task(calls.run(time.sleep, 3600)) for _ in range(4)]
    await asyncio.wait(hanging, timeout=0.1)
    for task in hanging:
        task.cancel()
    print(await asyncio.gather(*(calls.run("{}!".format, text) for text in "ab")))

asyncio.run(run())
"""


def test_hanging_call_blocks_neither_other_calls_nor_the_exit():
    """Two at a time: four calls hang and are given up; then two others have their turns, and the process ends."""
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['a!', 'b!']\n"
