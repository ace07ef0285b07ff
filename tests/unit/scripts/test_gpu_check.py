"""make gpu-check: its order, its deadlines, its measurements, and that failed or missing checks are never passed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import checks
from scripts.checks import ROOT, Outcome, Untested
from scripts.gpu_check import check_graphs, check_ipc, check_memory, check_throughput
from scripts.gpu_check.__main__ import CHECKS, main
from scripts.gpu_check.kit import Kit, need

FOLDER = ROOT / "scripts" / "gpu_check"
# A check that records two measurements and then hangs.
HANGS = """
import time
from pathlib import Path
from scripts import checks

def check():
    checks.expect(Path({out!r}), "slow", {{"mfu": (0.25, 0.5, "estimate")}})
    checks.record(Path({out!r}), "slow", "tokens_per_s", 1234.5)
    checks.record(Path({out!r}), "slow", "mfu", 0.375)
    time.sleep(600)

checks.child("slow", check, Path({out!r}))
"""


def test_every_check_has_its_file() -> None:
    assert {path.stem for path in FOLDER.glob("check_*.py")} == {f"check_{name.partition(':')[0]}" for name in CHECKS}
    assert {"compiled", *check_throughput.SHAPES} == {name[11:] for name in CHECKS if name.startswith("throughput:")}


def test_it_writes_a_table_and_keeps_results_of_other_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["gpu_check", "--device", "cpu", "--out", str(tmp_path), "--only"]
    monkeypatch.setattr(sys, "argv", [*arguments, "versions"])
    assert main() == 0, (tmp_path / "log.txt").read_text()
    monkeypatch.setattr(sys, "argv", [*arguments, "ipc", "--minutes", "0"])
    assert main() == 0
    report = json.loads((tmp_path / "report.json").read_text())
    versions, ipc = report["checks"]
    assert (versions["status"], ipc["status"]) == ("passed", "untested") and "--only ipc" in ipc["reason"]
    assert report["versions"]["torch"] == torch.__version__ and report["gpu"] == ""
    assert {"versions matmul_tflops", "versions copy_gb_per_s"} <= {figure["name"] for figure in report["figures"]}
    table = (tmp_path / "table.md").read_text()
    assert f"torch {versions['measurements']['torch']}," in table and "| ipc | **untested** | 0 |" in table


def test_measurements_of_a_check_that_is_stopped_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = tmp_path / "measurements.jsonl"

    def clock() -> float:  # the deadline passes when both measurements are written
        return 1000.0 if measurements.exists() and measurements.read_text().count("\n") == 3 else 0.0

    def run(name: str) -> Outcome:
        return checks.run_check(name, [sys.executable, "-c", HANGS.format(out=str(tmp_path))], tmp_path, deadline=100)

    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=clock))
    assert checks.run_all({"slow": "hangs"}, tmp_path, run, "t") == 1
    (outcome,) = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert outcome["measurements"] == {"tokens_per_s": 1234.5, "mfu": 0.375}
    assert outcome["expected"] == {"mfu": [0.25, 0.5, "estimate"]}
    row = (tmp_path / "table.md").read_text().splitlines()[-1]
    beside = "mfu 0.375 (expected 0.25 to 0.5: estimate)"
    assert row.startswith("| slow | **failed** | 1000 |") and row.endswith(f"; tokens_per_s 1234, {beside} |")
    assert "100 s" in row and str(tmp_path / "log.txt") in row
    assert f"    tokens_per_s 1234\n    {beside}\n" in capsys.readouterr().out


MEASUREMENTS: dict[str, tuple[list[str], list[str]]] = {  # check -> arguments, some of what it measures
    "throughput": (["0.5b"], ["tokens_per_s", "peak_gib", "trunk_ms", "head_ms", "fsdp_ms", "optimizer_ms", "rest_ms"]),
    "memory": ([], ["plain peak_gib", "lora idle_gib"]),
    "ipc": ([], ["digest_gb_per_s", "round 4 gb_per_s", "buckets"]),
    "attention": ([], ["sdpa float32", "sdpa tflops", "padded float32"]),
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_check_measures_small_sizes_on_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurements: dict[str, object] = {}
    monkeypatch.setattr(check_ipc.buckets, "BUCKET_BYTES", 2**20)
    monkeypatch.setattr(check_memory, "VARIANTS", {name: check_memory.VARIANTS[name] for name in ("plain", "lora")})
    kit = Kit("cpu", tmp_path, measurements.__setitem__)
    arguments, names = MEASUREMENTS[name]
    importlib.import_module(f"scripts.gpu_check.check_{name}").run(kit, *arguments)
    kit.raise_failures()
    assert {*names} <= measurements.keys()


def test_what_is_missing_is_named() -> None:
    with pytest.raises(Untested, match="no_such_library"):
        need("json", "no_such_library")
    with pytest.raises(Untested, match="CUDA graphs"):
        check_graphs.run(Kit("cpu", Path()))


# Packages of this project that a machine with torch, transformers and the wheels lacks. A finder hides them.
HIDDEN = "PIL bm25s cloudpickle datasets docstring_parser fastapi gguf httpx math_verify matplotlib mcp openai pandas "
HIDDEN += "plotext plotly py3langid pyarrow ray scipy starlette torchao uvicorn vllm wandb"
BARE = """
import sys
from importlib.machinery import PathFinder

class VisiblePackages(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else super().find_spec(name, path, target)

sys.meta_path = [VisiblePackages if finder is PathFinder else finder for finder in sys.meta_path]
"""
ONE_RUN = """
import importlib, sys
from pathlib import Path
from scripts.gpu_check import check_loop
from scripts.gpu_check.__main__ import CHECKS
from scripts.gpu_check.kit import Kit

for name in CHECKS:
    importlib.import_module("scripts.gpu_check.check_" + name.partition(":")[0])
check_loop.RUNS = {"hf": "hf"}
kit = Kit("cpu", Path(sys.argv[1]))
check_loop.run(kit)
kit.raise_failures()
"""


def test_a_run_needs_only_torch_transformers_and_the_wheels(tmp_path: Path) -> None:
    """GRPO with the hf engine and all imports of the checks, with other packages hidden."""
    (tmp_path / "sitecustomize.py").write_text(BARE.format(hidden=HIDDEN.split()))
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", ONE_RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hf grad_norm" in done.stdout
