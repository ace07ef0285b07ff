from __future__ import annotations

from collections.abc import Callable

import pytest

from alphaapollo.utils.disk import close_all


def failing(text: str) -> Callable[[], None]:
    def close() -> None:
        raise OSError(text)

    return close


def test_close_all_keeps_the_active_exception() -> None:
    closed: list[str] = []
    with pytest.raises(OSError, match="first"):
        close_all(failing("first"), failing("second"), lambda: closed.append("third"))
    with pytest.raises(ValueError, match="the run's own"):
        try:
            raise ValueError("the run's own")
        finally:
            close_all(failing("first"), lambda: closed.append("second"))
    close_all(lambda: closed.append("well"))
    assert closed == ["third", "second", "well"]
