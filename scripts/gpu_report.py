"""Write the GPU tables of docs/benchmark_details.md and docs/recipes.md from the report of gpu-check:

    python -m scripts.gpu_report outputs/gpu_check/report.json
    python -m scripts.gpu_report                                # expected values, before any measurement

A figure without a measurement is "not yet measured".
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.checks import ROOT, format_number, format_range
from scripts.gpu_check.__main__ import CHECKS
from scripts.gpu_check.check_step import MEASURED
from scripts.gpu_check.expectations import H100, list_expectations
from scripts.gpu_check.report import Figure, list_figures

BLOCK = re.compile(r"(<!-- gpu-report: .* -->\n).*?(<!-- end of gpu-report -->)", re.DOTALL)
PAGES = {  # page: checks in its table
    "docs/benchmark_details.md": [name for name in CHECKS if name != "step:gsm8k"],
    "docs/recipes.md": ["step:gsm8k"],
}
VERSIONS = ("torch", "vllm", "ray", "transformers", "liger_kernel", "flash_attn")
NOT_MEASURED = "not yet measured"


def list_rows(report: dict[str, Any]) -> list[Figure]:
    """Return the figures of all checks, in their order: those of the report, and expected ones that it lacks."""
    found = {figure["name"]: Figure(**figure) for figure in report["figures"]}
    rows = []
    for check in CHECKS:
        missing = dict.fromkeys(MEASURED.values() if check.startswith("step:") else ())
        planned = list_figures(check, missing, list_expectations(check, report["gpu"] or H100))
        expected = {figure.name: figure for figure in planned}
        own = {name: figure for name, figure in found.items() if name.partition(" ")[0] == check}
        rows += [figure for figure in (expected | own).values() if figure.unit or figure.expected]
    return rows


def render_table(report: dict[str, Any], figures: Iterable[Figure]) -> str:
    versions = report["versions"]
    software = [f"{name} {versions[name]}" for name in VERSIONS if versions.get(name, "none") != "none"]
    if report["gpu"]:
        intro = f"Measured on {report['date']} on {report['gpu']}, driver {report['driver']}, {', '.join(software)}."
    else:
        intro = "Not yet measured on a GPU: the expected values are calculated or estimated."
    lines = [
        intro,
        "",
        "| check | figure | unit | expected | measured | source of the expectation |",
        "|---|---|---|---|---|---|",
    ]
    for one in figures:
        check, _, name = one.name.partition(" ")
        expected = format_range(*one.expected) if one.expected else ""
        measured = NOT_MEASURED if one.measured is None else format_number(one.measured)
        lines.append(f"| `{check}` | {name} | {one.unit} | {expected} | {measured} | {one.source} |")
    return "\n".join(lines) + "\n"


def render_page(text: str, checks: Iterable[str], report: dict[str, Any], rows: list[Figure]) -> str:
    """Return a page with the figures of `checks` between its markers."""
    assert len(BLOCK.findall(text)) == 1, "a page has one pair of markers"
    table = render_table(report, [row for row in rows if row.name.partition(" ")[0] in checks])
    return BLOCK.sub(lambda block: f"{block[1]}{table}{block[2]}", text)


def read_report(path: Path | None) -> dict[str, Any]:
    """Read a report of gpu-check; without a path, return one without figures. Raises ValueError for a CPU's report."""
    if path is None:
        return {"date": "", "gpu": "", "driver": "", "versions": {}, "figures": []}
    report: dict[str, Any] = json.loads(path.read_text())
    if not report["gpu"]:
        raise ValueError(f"{path} was measured on a CPU with small models. Run make gpu-check on a GPU.")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="report.json of gpu-check")
    report = read_report(parser.parse_args().file)
    rows = list_rows(report)
    for name, checks in PAGES.items():
        page = ROOT / name
        page.write_text(render_page(page.read_text(), checks, report, rows))


if __name__ == "__main__":
    main()
