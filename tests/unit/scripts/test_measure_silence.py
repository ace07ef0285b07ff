import sys
from pathlib import Path

import pytest

from scripts.measure_silence import Write, find_gaps, main, record_writes

PRINT = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns if sys.stdout.isatty() else '')"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("terminal", "printed"), [("", b"False \n"), ("90x20", b"True 90\r\n")])
def test_writes_to_a_pipe_and_to_a_terminal(terminal: str, printed: bytes) -> None:
    writes, duration, code = record_writes([sys.executable, "-c", f"{PRINT}; sys.exit(3)"], terminal)
    assert b"".join(write.data for write in writes) == printed
    assert code == 3 and all(0 <= write.seconds <= duration for write in writes)


def test_longest_gaps_first() -> None:
    first, second = Write(1.0, b"a"), Write(1.5, b"b")
    gaps = find_gaps([first, second], 4.0)
    assert [seconds for seconds, _, _ in gaps] == [2.5, 1.0, 0.5]
    assert gaps[0][1] is second and gaps[1][2] is first and gaps[2][1:] == (first, second)


@pytest.mark.timeout(60)
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    assert main(["--log", str(log), "--", sys.executable, "-c", "print('hello')"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert log.read_bytes() == b"hello\n"
    assert lines[0].startswith("exit code 0 after ") and lines[-1].endswith(" s  hello")
