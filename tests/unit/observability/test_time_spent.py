from __future__ import annotations

import io

from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.time_spent import TimeSummary


def test_time_summary() -> None:
    spent = TimeSummary()
    assert spent.format_line(0) == ""
    spent.add({"timing/start": 10.0, "timing/validate": 2.0, "timing/step": 2.0, "val/accuracy": 0.5})
    for _ in range(2):
        spent.add({"timing/generate": 5.0, "timing/update": 3.0, "timing/other": 0.99, "timing/step": 9.0})
        spent.add({"timing/publish": 0.01})
    line = "start 33%, generate 33%, update 20%, validate 7%, other 7% of 30.0 s (docs/profiles.md)"
    assert spent.format_line(0) == f"time: {line}"
    assert spent.format_line(7) == f"time since the resume after step 7: {line}"


def test_the_summary_of_a_resumed_run_says_so() -> None:
    file = io.StringIO()
    console = Console(Terminal(file=file))
    console.start(total_steps=3, completed_steps=2)
    console.show_step(3, {"timing/generate": 3.0, "timing/update": 1.0, "timing/step": 4.0})
    console.show_time_summary()
    assert file.getvalue().splitlines()[-1] == (
        "time since the resume after step 2: generate 75%, update 25% of 4.0 s (docs/profiles.md)"
    )
