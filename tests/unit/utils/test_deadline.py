from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable

import pytest

from alphaapollo.utils.deadline import DeadlineError, limit_seconds


def count_to_the_end() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    "call", [count_to_the_end, lambda: re.match(r"(a|a)*!", "a" * 99), lambda: 9**9**9], ids=["loop", "regex", "power"]
)
def test_code_that_never_ends_is_ended(call: Callable[[], object]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(DeadlineError, match="too slow"), limit_seconds(0.1, "too slow"):
        call()
    assert signal.getsignal(signal.SIGALRM) is before


def test_other_threads_have_no_limit() -> None:
    done: list[int] = []

    def work() -> None:
        with limit_seconds(0.0, "too slow"):
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert done == [1]
