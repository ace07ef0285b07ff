"""The Python API in a real notebook: the tour notebook, and an interrupt during a run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loop.conftest import DEADLINE, MARK, ROOT, Runner, processes_of, wait_until_nothing_is_left
from tests.page_commands import NEEDS_PLUGINS

nbclient = pytest.importorskip("nbclient", reason="runs notebooks: it is in requirements/dev.txt, with ipykernel")
pytest.importorskip("ipykernel", reason="runs notebooks: it is in requirements/dev.txt, with nbclient")
nbformat = pytest.importorskip("nbformat", reason="reads notebooks: it comes with nbclient")


def client(ppo: Runner, notebook: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Notebook client with a kernel that works in the test's folder and is identified as the test's."""
    monkeypatch.setenv(MARK, str(ppo.out))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # not the user's
        monkeypatch.setenv(name, str(ppo.out / name.lower()))
    return nbclient.NotebookClient(notebook, timeout=DEADLINE, resources={"metadata": {"path": str(ppo.out)}})


def shown(cell: Any, kind: str) -> str:
    """Output of a cell in this MIME type."""
    return "".join(output.get("data", {}).get(kind, "") for output in cell.outputs)


@NEEDS_PLUGINS  # it chats
def test_tour_notebook(ppo: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(ROOT / "examples/notebook/tour.ipynb", as_version=4)
    nbformat.validate(notebook)
    client(ppo, notebook, monkeypatch).execute()
    installed, curve, table, evaluated, chat = (
        next(cell for cell in notebook.cells if cell.cell_type == "code" and said in cell.source)
        for said in ("find_spec", ".plot(", "run.metrics[[", "evaluate(", "print(chat(")
    )
    assert installed.outputs == [] and shown(curve, "image/png")
    assert "critic/score/mean" in shown(table, "text/html") and "avg@4" in shown(evaluated, "text/plain")
    run = ppo.out / "outputs/notebook/alphaapollo/digits"
    scores = [json.loads(line).get("critic/score/mean") for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    assert scores[1] < 0.2 and scores[-1] > 0.8
    answers = re.findall(r"^> (.+)$", "".join(output["text"] for output in chat.outputs), flags=re.MULTILINE)
    assert len(answers) == 2 and all(sum(map(str.isdigit, answer)) > 6 for answer in answers)
    wait_until_nothing_is_left(ppo)


CELL = """
from pathlib import Path

from alphaapollo import rl

rl({settings!r}, reward=lambda prompt, completion: len(completion) / 10,
   on_iteration=lambda step, metrics: Path({iterated!r}).touch())
"""


@pytest.mark.nightly
def test_interrupt_leaves_only_the_kernel(ppo: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    iterated = ppo.out / "iterated"
    own = {"trainer.controller": "local", "actor_rollout_ref.rollout.name": "hf", "data.val_files": []}
    own |= {"trainer.total_training_steps": 100_000, "trainer.save_freq": -1}
    sizes = {key: value for key, value in (ppo.sizes("run") | own).items() if key != "custom_reward_function.path"}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in sizes.items()}
    cells = [CELL.format(settings=settings, iterated=str(iterated)), "import os\nos.getpid()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = client(ppo, notebook, monkeypatch)

    async def interrupted() -> None:
        async with kernel.async_setup_kernel():
            running = asyncio.create_task(kernel.async_execute_cell(notebook.cells[0], 0))
            end = time.monotonic() + DEADLINE
            while not iterated.exists():
                assert not running.done() and time.monotonic() < end, notebook.cells[0].outputs
                await asyncio.sleep(0.05)
            assert len(processes_of(ppo)) > 1
            await kernel.km.interrupt_kernel()
            with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
                await running
            await kernel.async_execute_cell(notebook.cells[1], 1)
            own_pid = int(shown(notebook.cells[1], "text/plain"))  # the kernel still answers
            end = time.monotonic() + DEADLINE  # its processes are ending
            while (left := processes_of(ppo)).keys() != {own_pid}:
                assert time.monotonic() < end, f"left behind: {left}"
                await asyncio.sleep(0.05)

    asyncio.run(interrupted())
    wait_until_nothing_is_left(ppo)
