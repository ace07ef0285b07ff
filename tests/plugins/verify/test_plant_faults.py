"""Each fault of scripts/plant_faults.py can be planted: its text occurs once, and the file remains valid Python."""

from __future__ import annotations

import ast

import pytest

from scripts import plant_faults

FAULTS = plant_faults.read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_fault_can_be_planted(fault: plant_faults.Fault) -> None:
    assert fault.settings in plant_faults.SETTINGS
    for file, old, new in fault.edits:
        assert not file.startswith("plugins/")  # which finds the faults
        text = (plant_faults.ROOT / plant_faults.PACKAGE / file).read_text()
        faulty = plant_faults.replace_once(file, text, old, new)
        assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text))


def test_there_are_enough_faults_with_different_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


def test_a_text_must_occur_once() -> None:
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=r"file\.py"):
            plant_faults.replace_once("file.py", text, "x = 1", "x = 2")
