"""Print the plan of a command before it starts: a table of settings, the planned memory, and notices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from alphaapollo.launch.memory.plan import GIB, MemoryPlan
from alphaapollo.observability.terminal import Terminal


def print_plan_table(
    folder: Path, rows: Mapping[str, str], memory: MemoryPlan | None, notices: Iterable[str], terminal: Terminal
) -> None:
    """Print the plan of a run: a table of `rows` (label -> text), the planned memory if it is given, and notices."""
    table = _make_empty_table(str(folder))
    for name, value in rows.items():
        table.add_row(name, escape(value))
    terminal.print(table)
    if memory:
        terminal.print(make_memory_table(memory))
    for notice in notices:
        terminal.print(f"[yellow]note[/yellow] {escape(notice)}", highlight=False)


def describe_memory_peak(memory: MemoryPlan | None) -> str:
    """Describe the peak of planned memory, e.g. `31.2 GiB on a GPU of 80 GiB at its peak (publish), calculated`."""
    if memory is None:
        return "not known"
    moment, usage = memory.peak
    offloaded = f"{memory.offloaded_bytes / GIB:.1f} GiB of host memory per node"
    host = f"; offloaded, {offloaded}" if memory.offloaded_bytes else ""
    return f"{usage.total / GIB:.1f} GiB on {memory.device_name} at its peak ({moment}){host}, calculated"


def describe_checkpoint_schedule(frequency: int, unit: str, memory: MemoryPlan | None) -> str:
    """Describe how often checkpoints are written, and whether the next iteration waits for them. frequency: iterations
    between checkpoints; -1: never. unit: plural word for iterations, e.g. steps."""
    if frequency < 1:
        return "never"
    often = f"every {frequency} {unit}, and at the end; written"
    if memory is None:
        return f"{often} while the next one runs"
    size = f"{memory.checkpoint_copy_bytes / GIB:.1f} GiB"
    if memory.saves_in_background:
        return f"{often} while the next one runs, from copies in host memory ({size})"
    return f"{often} before the next one begins: copies ({size}) do not fit into memory"


def make_memory_table(memory: MemoryPlan) -> Table:
    """Return a table of the planned memory in GiB at each moment: the total, and each kind with at least 0.05 GiB."""
    table = _make_empty_table(f"GiB on {memory.device_name}")
    table.columns[0].no_wrap = True
    table.add_column(justify="right", no_wrap=True)
    for phase, usage in memory.usage_by_phase.items():
        parts = ((kind.replace("_", " "), size / GIB) for kind, size in usage.to_dict().items())
        words = ", ".join(f"{name} {gib:.1f}" for name, gib in parts if gib >= 0.05)
        table.add_row(escape(phase), f"{usage.total / GIB:.1f}", words)
    return table


def _make_empty_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    return table
