"""`alphaapollo skill`: tests/loop/test_documentation.py runs the commands of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from alphaapollo.plugins.skill.command import main


def test_the_skill_is_printed_and_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert main(["install"]) == main(["install", "mine"]) == 0
    for folder in (".agents/skills", "mine"):
        assert Path(folder, "alphaapollo", "SKILL.md").read_text() == printed
    fields = yaml.safe_load(printed.split("---\n")[1])
    assert fields["name"] == "alphaapollo" and 0 < len(fields["description"]) <= 1024
