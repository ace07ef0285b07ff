"""`alphaapollo plot`."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.cli.main import main
from tests.builders import write_rows


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_rows(tmp_path / "metrics.jsonl", [{"step": step, "val/accuracy": step / 4} for step in (1, 2)])
    return tmp_path


@pytest.mark.parametrize("option", ["--figure", "--png"])
def test_a_plot_in_the_terminal_and_in_a_file(run: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(run), "val/accuracy", option, str(run / "out" / "curve.pdf")]) == 0
    assert "┤" in capsys.readouterr().out
    assert (run / "out" / "curve.pdf").read_bytes().startswith(b"%PDF")


def test_errors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([run, "nope"], ["gone", "val/accuracy"], [run, "val/accuracy", "--figure", "curve.jpg"]):
        assert (
            main(["plot", *map(str, words)]) == 2
            and str(words[-1 if words[0] == run else 0]) in capsys.readouterr().err
        )
