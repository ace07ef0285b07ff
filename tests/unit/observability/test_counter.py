from io import StringIO

from alphaapollo.observability.counter import LoopProgressBar
from alphaapollo.observability.terminal import Terminal


def lines(total: int, done: int = 0) -> list[str]:
    out = StringIO()
    with LoopProgressBar("prompts", total, done, Terminal(file=out, width=80)) as counter:
        for number in range(done, total):
            counter.advance(f"[{number}]")
    return out.getvalue().splitlines()


def test_a_line_every_tenth() -> None:
    assert lines(3) == ["1/3 prompts   [0]", "2/3 prompts   [1]", "3/3 prompts   [2]"]
    assert [line.split("/")[0] for line in lines(1000)] == [str(100 * tenth) for tenth in range(1, 11)]
    assert [line.split("/")[0] for line in lines(100, done=75)] == ["80", "90", "100"]


def test_a_bar_in_a_terminal() -> None:
    out = StringIO()
    with LoopProgressBar("prompts", 4, 1, Terminal(file=out, width=100, force_terminal=True)) as counter:
        for _ in range(3):
            counter.advance("accuracy 0.500")
    assert "4/4" in out.getvalue() and "accuracy 0.500" in out.getvalue()
