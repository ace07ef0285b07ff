"""The Python API in a real notebook. test_command.py shows it in scripts, also with Ctrl-C."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from tests.loop.conftest import DEADLINE, MARK, ROOT, Runner, wait_until_nothing_is_left
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


@pytest.mark.nightly
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
