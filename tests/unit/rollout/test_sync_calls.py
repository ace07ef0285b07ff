import subprocess
import sys

HANGING = """
import asyncio, time
from alphaapollo.rollout.sync_calls import SyncCalls

async def run():
    calls = SyncCalls(at_a_time=2)
    hanging = [asyncio.create_task(calls.run(time.sleep, 3600)) for _ in range(4)]
    await asyncio.wait(hanging, timeout=0.1)
    for task in hanging:
        task.cancel()
    print(await asyncio.gather(*(calls.run("{}!".format, text) for text in "ab")))

asyncio.run(run())
"""


def test_a_sync_call_that_never_returns_keeps_no_place_and_no_process():
    """Two at a time: four calls hang and are given up; then two others have their turns, and the process ends."""
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['a!', 'b!']\n"
