"""scripts/gpu_report.py: expected and measured figures on the pages; none is reported before it is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.checks import ROOT, Outcome
from scripts.gpu_check import check_memory
from scripts.gpu_check.__main__ import CHECKS
from scripts.gpu_check.expectations import ESTIMATE, PLANNER, SIMULATION, list_expectations
from scripts.gpu_check.report import make_report
from scripts.gpu_report import BLOCK, NOT_MEASURED, PAGES, list_rows, read_report, render_page

H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {check: list_expectations(check) for check in CHECKS}


def make_outcomes() -> list[Outcome]:
    versions = {"torch": "2.13.0+cu130", "vllm": "0.32.0", "flash_attn": "none", "matmul_tflops": 700.0}
    update = {"tokens_per_s": 51234.5, "peak_gib": 30.25, "checkpointing": False, "liger": "failed: no kernel"}
    return [
        Outcome("versions", "passed", 1.0, versions, "", {"matmul_tflops": [0.0, 989.0, "data sheet"]}),
        Outcome("throughput:0.5b", "failed", 1.0, update, "liger", {"peak_gib": [31.4, 31.4, PLANNER]}),
        Outcome("step:gsm8k", "passed", 1.0, {"seconds": 33.0}),
    ]


def test_expectations_have_sources_and_sizes(expected: dict[str, Any]) -> None:
    assert expected["step:0.5b"]["seconds"] == (70.0, 105.0, ESTIMATE)
    assert expected["throughput:0.5b"]["waits_per_micro_batch"] == (2.0, 2.0, SIMULATION)
    for check, name in (("throughput:0.5b", "peak_gib"), ("step:0.5b", "policy_peak_gib")):
        low, high, source = expected[check][name]
        assert source == PLANNER and 25 < low == high < 40  # simulated: 29.9 GiB
    peaks = {name: expected["memory"][f"{name} peak_gib"][1] for name in check_memory.VARIANTS}
    assert peaks["checkpointing"] < peaks["plain"] < 30 and peaks["lora"] < peaks["plain"]


def test_before_a_measurement_the_pages_have_expectations() -> None:
    report = read_report(None)
    rows = list_rows(report)
    assert all(row.measured is None for row in rows) and len({row.name for row in rows}) == len(rows)
    assert "step:gsm8k seconds" in {row.name for row in rows}
    for name, checks in PAGES.items():
        text = (ROOT / name).read_text()
        if NOT_MEASURED in BLOCK.findall(text)[0] or "Not yet measured" in text:
            assert render_page(text, checks, report, rows) == text, "run python -m scripts.gpu_report"


def test_a_report_fills_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(make_report("NVIDIA H100 80GB HBM3", "580.65", make_outcomes())))
    report = read_report(path)
    rows = list_rows(report)
    marks = "<!-- gpu-report: x -->\nold\n<!-- end of gpu-report -->\n"
    page = render_page(f"before\n{marks}after", PAGES["docs/benchmarks.md"], report, rows)
    assert f"on {report['date']} on NVIDIA H100 80GB HBM3, driver 580.65, torch 2.13.0+cu130, vllm 0.32.0." in page
    for line in (
        "| `versions` | matmul_tflops | TFLOP/s | 0 to 989 | 700 | data sheet |",
        f"| `throughput:0.5b` | peak_gib | GiB | 31.4 | 30.25 | {PLANNER} |",
        "| `throughput:0.5b` | tokens_per_s | tokens/s |  | 51,234 |  |",
        f"| `step:0.5b` | seconds | s | 70 to 105 | {NOT_MEASURED} | {ESTIMATE} |",
    ):
        assert line in page.splitlines()
    assert page.startswith("before\n") and page.endswith("after") and "old" not in page and "flash_attn" not in page
    assert "step:gsm8k" not in page and "| liger |" not in page  # neither another page's figures nor failed parts
    recipes = render_page(marks, PAGES["docs/recipes.md"], report, rows)
    assert "| `step:gsm8k` | seconds | s |  | 33 |  |" in recipes
