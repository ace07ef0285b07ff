from __future__ import annotations

import io

from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.time_spent import format_time_summary


def test_time_summary() -> None:
    assert format_time_summary({}, 0) == ""
    spent = {"timing/start": 10.0, "timing/validate": 2.0, "timing/generate": 10.0, "timing/update": 6.0}
    spent |= {"timing/other": 1.98, "timing/publish": 0.02, "timing/step": 20.0}
    line = "start 33%, generate 33%, update 20%, validate 7%, other 7% of 30.0 s (docs/profiles.md)"
    assert format_time_summary(spent, 0) == f"time: {line}"
    assert format_time_summary(spent, 7) == f"time since the resume after step 7: {line}"


def test_the_summary_of_a_resumed_run_says_so() -> None:
    file = io.StringIO()
    console = Console(Terminal(file=file))
    console.start(total_steps=3, completed_steps=2)
    console.show_step(3, {"timing/generate": 3.0, "timing/update": 1.0, "timing/step": 4.0})
    console.show_time_summary()
    assert file.getvalue().splitlines()[-1] == (
        "time since the resume after step 2: generate 75%, update 25% of 4.0 s (docs/profiles.md)"
    )
