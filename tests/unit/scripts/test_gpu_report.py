"""scripts/gpu_report.py: expected and measured figures on the pages; none is reported before it is measured."""

from __future__ import annotations

from scripts.checks import ROOT
from scripts.gpu_check import check_memory
from scripts.gpu_check.__main__ import CHECKS
from scripts.gpu_check.expectations import ESTIMATE, PLANNER, SIMULATION, list_expectations
from scripts.gpu_report import BLOCK, NOT_MEASURED, PAGES, list_rows, read_report, render_page


def test_expectations_have_sources_and_sizes() -> None:
    expected = {check: list_expectations(check) for check in CHECKS}
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
