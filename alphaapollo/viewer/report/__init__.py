"""Reports of runs in one file: what was trained and how, results with intervals, samples, costs, and how to repeat it.

files of the runs (data.py) -> rows of tables (tables.py) and charts -> page (templates/report.html, formats.py)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.viewer import run_folders
from alphaapollo.viewer.curves import group_by_seed
from alphaapollo.viewer.report import formats, tables
from alphaapollo.viewer.report.data import read_run


def make_report(folders: Sequence[Path]) -> bytes:
    """Make the report of a run, or the comparison of several, as an HTML page. Raises ValueError for a folder that is
    no run."""
    folders = list(dict.fromkeys(folder.expanduser().absolute() for folder in folders))
    for folder in folders:
        check_format(folder)
        if not any((folder / name).is_file() for name in run_folders.MARKERS):
            markers = ", ".join(run_folders.MARKERS)
            below = ", ".join(map(str, run_folders.find_runs(folder))) or "none"
            raise ValueError(
                f"{folder} is no run: it has none of {markers}. Give the folder of a run; runs in it: {below}."
            )
    root = Path(os.path.commonpath(folders))
    runs = [read_run(folder, run_folders.make_run_name(folder, root)) for folder in folders]
    by_seed = group_by_seed(dict(enumerate(folders)), root)
    groups = {name: [runs[at] for at in own] for name, own in by_seed.items()}
    title = f"Report of {runs[0].name}" if len(runs) == 1 else f"Comparison of {len(runs)} runs"
    charts = list(tables.list_charts(groups))
    return formats.render_page(
        {"title": title, "runs": runs, "groups": groups, "charts": charts, "tables": tables, "folders": run_folders}
    )
