"""Output of models and servers never controls the terminal."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from alphaapollo.config.errors import ConfigError, exit_on_config_error, report_error
from alphaapollo.observability.terminal import Terminal

HOSTILE = "\x1b]52;c;Y2F0\x1b\\\x1b[2J\x9b31m\u202eanswer\nnext"
SHOWN = " ]52;c;Y2F0 \\ [2J 31m answer\nnext"


@pytest.mark.parametrize("value", [HOSTILE, Text(HOSTILE), Text.assemble(("", "yellow"), HOSTILE)])
def test_a_terminal_prints_no_escape_codes(value: str | Text) -> None:
    file = io.StringIO()
    Terminal(file=file, force_terminal=True, color_system=None).print(value, markup=False, soft_wrap=True)
    assert file.getvalue() == SHOWN + "\n"


def test_errors_print_no_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(ValueError(HOSTILE), 1) == 1
    assert capsys.readouterr().err == f"error: {SHOWN}\n"
    with pytest.raises(SystemExit), exit_on_config_error():
        raise ConfigError(f"key={HOSTILE}")
    assert capsys.readouterr().err.endswith(f"key={SHOWN}\n")
